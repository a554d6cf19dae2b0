"""What a run is made of while it trains, whatever its plan."""
