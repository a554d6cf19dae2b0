"""What is observed when a run runs: memory by row, throughput, the machine itself."""
