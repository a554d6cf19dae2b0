"""Advice for users of other tools' training loops."""
