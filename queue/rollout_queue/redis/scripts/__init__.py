"""Every Lua script that Redis runs, in one module for each subject. A script runs as a whole or not at
all."""
