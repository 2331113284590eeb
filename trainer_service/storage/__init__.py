"""What the trainer keeps on disk: checkpoints and published policies."""
