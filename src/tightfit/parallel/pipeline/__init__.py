"""One rank of a pipeline: its stages, its schedule, and what it sends and receives."""
