"""Writers: staging, shards, receipts, seal and commit."""
