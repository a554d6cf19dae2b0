"""Measurements of a run: its memory by row, its throughput, and its results beside those of plain PyTorch."""
