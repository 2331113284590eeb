"""Reports what the trainer does, and makes sure that only one trainer runs."""
