"""Measurements: a run's memory by row and its throughput, and the machine's rates."""
