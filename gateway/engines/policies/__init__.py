"""Policies: their registration, the push of one to every rollout server, and what the fleet is to serve."""
