"""What a step costs: the ledger, its entries, the recorded step and pipeline schedules."""
