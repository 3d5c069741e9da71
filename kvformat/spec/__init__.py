"""What the bytes mean: limits, canonical JSON, digests, documents, schema, layout. Pure: no I/O, no torch."""
