"""Policy losses, token by token, and their settings."""
