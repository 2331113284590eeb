"""What the trainer says of itself while it runs, and that it is the only one."""
