"""`weir import`: recorded sessions back into the queue, for offline or replayed training."""
