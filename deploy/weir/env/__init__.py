"""`weir env`: its commands, and a demo that learns a task of a library."""
