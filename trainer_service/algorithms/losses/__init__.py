"""Policy losses, token by token."""
