"""Predict memory and time of a training job, and choose a plan for it, before anything is
allocated."""
