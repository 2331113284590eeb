"""How often retries joined a call, and how often clients left one."""


class RetryCounts:
    """How often a retry joined, and how often a client left."""

    joined = left = 0
