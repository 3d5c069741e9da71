"""Bytes to values and back: shard headers, record sums, index parts. No I/O."""
