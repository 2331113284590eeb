"""Appends turns, and retracts those whose clients were told that they failed."""
