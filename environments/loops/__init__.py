"""Agent loops: short programs that a user can read, copy and change."""
