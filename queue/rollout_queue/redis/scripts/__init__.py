"""What happens inside Redis: every Lua script."""
