"""Counts how often retries joined a call, and how often clients left one."""


class RetryCounts:
    """How often a retry joined a call in flight, and how often a client left one."""

    joined = left = 0
