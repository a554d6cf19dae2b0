"""Checkpoints: what a run saves, and how it resumes."""
