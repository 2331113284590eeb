"""Corrections for the mismatch between the policy that sampled a token and the one that trains it."""
