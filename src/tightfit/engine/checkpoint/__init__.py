"""Checkpoints: collect a run's tensors, save them, and resume a run from them."""
