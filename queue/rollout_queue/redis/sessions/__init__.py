"""Sessions in Redis: opened, and ended when nothing happens in them any more."""
