"""How a version gets into the engine: prepared, loaded as a transaction, or received from the trainer."""
