"""Every Lua script that Redis runs, in one module for each subject. A script runs whole or not at all."""
