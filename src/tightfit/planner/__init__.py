"""What is planned before a run: the plan that completes what the user pinned."""
