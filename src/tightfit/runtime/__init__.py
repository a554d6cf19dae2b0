"""The parts of a run that trains: the `Run` itself, and code that the plan's methods put into it."""
