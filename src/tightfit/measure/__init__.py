"""Measurements: a run's memory by row, its throughput, and the rates at which the machine runs
operations."""
