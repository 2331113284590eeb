"""Collects sessions to groups, compares their members, and decides which of them are trained."""
