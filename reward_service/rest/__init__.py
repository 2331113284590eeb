"""The routes of the reward service."""
