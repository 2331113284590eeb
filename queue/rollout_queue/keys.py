"""Every Redis key that Weir uses, in one place."""

STREAM = "weir:stream"
"""Turns, rewards and outcomes, in the order in which they became durable."""
STREAM_FIELD = b"r"
GROUP = "trainer"
CONSUMER = "trainer-0"
"""Fixed, never a host name: a restarted trainer finds its own pending entries again."""

DEAD_LETTERS = "weir:dead"
"""Stream: entries that no build of ours can read, with their bytes and the error."""

SESSIONS = "weir:sessions"
"""Sorted set: session id by creation time."""
DEADLINES = "weir:deadlines"
"""Sorted set: unfinished session id by expiry time."""
VERDICTS = "weir:verdicts"
"""Hash: how many sessions and turns ended with which verdict ("session:trained", "turn:stale", …)."""
TRAINER = "weir:trainer"
"""Hash: what the trainer last said of itself."""
POLICIES = "weir:policies"
"""Hash: version → policy, JSON."""
SERVING = "weir:serving"
"""The version that the fleet is to serve."""
SERVERS = "weir:rollout_servers"
"""Hash: rollout server id → registration, JSON."""
HELD = "weir:rollout_servers_held"
"""Set: rollout servers that an operator took out of rotation."""
SECRET = "weir:secret"  # noqa: S105 - the name of a key, not a secret
"""Signs session keys, so that they are never stored."""


def session(session_id: str) -> str:
    """Hash of one session: `spec`, `outcome`, `verdict`, `t:{turn}`, `r:{reward key}`, `v:{turn}`."""
    return f"weir:s:{session_id}"


def group(group_id: str) -> str:
    """Hash of one group: `size` and `owner`."""
    return f"weir:g:{group_id}"


def group_members(group_id: str) -> str:
    """Set: the session ids of one group."""
    return f"weir:g:{group_id}:members"


def continuation(owner: str, reply_digest: str) -> str:
    """String: the session of `owner` in which a conversation with this digest was answered last."""
    return f"weir:c:{owner}:{reply_digest}"
