"""Run one pipeline rank: its stages, its schedule, and its messages to other ranks."""
