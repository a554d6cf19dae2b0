"""Whole trainings as a user writes them, from the first call to the last checkpoint."""
