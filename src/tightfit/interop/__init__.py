"""Advice for users of other training loops."""
