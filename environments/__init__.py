"""Environments: tasks, episodes and rewards, played against a gateway through its public door."""
