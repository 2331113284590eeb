"""What is done about the difference between what sampled a token and what trains it."""
