"""From the user's model on fake tensors to the recorded step."""
