"""The command line: bring everything up on this machine, demo, status."""
