"""`weir backup` and `weir restore`: Redis, checkpoint and policies at one moment, while all runs."""
