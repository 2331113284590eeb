"""The stream, the policies' register and the trainer's lease on Redis."""
