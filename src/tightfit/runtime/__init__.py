"""The parts of a run that trains: the `Run` itself, and what methods add to it."""
