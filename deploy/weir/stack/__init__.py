"""Starts, watches and stops all services of one machine."""
