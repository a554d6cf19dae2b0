"""Tensor parallelism: linear layers and embeddings are sharded over the tp devices."""
