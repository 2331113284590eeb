"""What a step trains: rows of tokens, packed into micro-batches."""
