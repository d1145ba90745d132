"""HSDP: gradients of shards that other ranks hold too."""
