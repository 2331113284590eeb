"""`weir import`: writes exported sessions back to the queue, for training on recorded data."""
