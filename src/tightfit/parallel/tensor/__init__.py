"""Tensor parallelism: shard linear layers and embeddings over the tp devices, by columns and rows."""
