"""The output head, as the trainer computes it, and its adapter."""
