"""Trace the user's model on fake tensors and record its step."""
