"""A simulated day of more sessions than the trainer trains."""
