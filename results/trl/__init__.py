"""The same tasks with TRL's GRPOTrainer, from the same first model."""
