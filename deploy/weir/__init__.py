"""The command line `weir`: it starts, stops, watches and audits everything on one machine."""
