"""Every Redis key that Weir uses, in one place."""

STREAM = "weir:stream"
"""Turns, rewards, outcomes and deletions, in the order in which they became durable."""
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
SETTLED = "weir:settled"
"""Sorted set: session that has a verdict, by when it got that, in ms by the stream's clock."""
FORGOTTEN = "weir:forgotten"
"""Hash: of what `weir:verdicts` counts, how much is forgotten since; and "tokens:trained" of it."""
FORGOTTEN_IDS = "weir:forgotten_ids"
"""Sorted set: the last sessions ("s:…") and groups ("g:…") that were forgotten, by time."""
TRAINER = "weir:trainer"
"""Hash: what the trainer last said of itself."""
LEASE = "weir:trainer_lease"
"""String: the process that trains, JSON (`holder`); runs out unless that renews it."""
FENCE = "weir:trainer_fence"
"""String: the token of the last who claimed the lease, whether or not it holds it still."""
POLICIES = "weir:policies"
"""Hash: version → policy, JSON."""
RESERVED = "weir:policy_reserved"
"""Hash: the highest `version` that the trainer has taken for a step, and the `location` of its weights."""
SERVING = "weir:serving"
"""The version that the fleet is to serve."""
SERVERS = "weir:rollout_servers"
"""Hash: rollout server id → registration, JSON."""
HELD = "weir:rollout_servers_held"
"""Set: rollout servers that an operator took out of rotation."""
SECRET = "weir:secret"  # noqa: S105 - the name of a key, not a secret
"""Signs session keys, so that they are never stored."""
OPEN = "weir:open"
"""Sorted set: open sessions, by time. Kept for a limit of open sessions."""
UNTRAINED = "weir:untrained"
"""Sorted set: sessions opened for training that have no verdict, by time. Kept for a staleness budget."""

DELETED = "weir:deleted"
"""Hash: deleted session id → tombstone, JSON."""
DELETING = "weir:deleting"
"""Sorted set: deleted sessions of which the streams may still hold something, by the time of the deletion."""
DELETED_USERS = "weir:deleted_users"
"""Set: SHA-256 of the names of users whose data was deleted."""


def session(session_id: str) -> str:
    """Hash of one session: `spec`, `outcome`, `verdict`, `t:{turn}`, `r:{reward key}`, `v:{turn}`, and
    `q:{request}` once a retry of that request is among the turns; `beat`, the last heartbeat."""
    return f"weir:s:{session_id}"


def group(group_id: str) -> str:
    """Hash of one group: `size` and `owner`."""
    return f"weir:g:{group_id}"


def group_members(group_id: str) -> str:
    """Set: the session ids of one group."""
    return f"weir:g:{group_id}:members"


def user_sessions(user: str) -> str:
    """Set: the sessions that were opened for a user, or that hold a call made for it."""
    return f"weir:u:{user}"


def continuation(owner: str, digest: str) -> str:
    """String: the session of `owner` in which a conversation with this digest was answered last, or which
    holds the turn of this id."""
    return f"weir:c:{owner}:{digest}"


def response(response_id: str) -> str:
    """String: what one response adds to the conversation before it, for `previous_response_id`."""
    return f"weir:r:{response_id}"


def open_of(owner: str) -> str:
    """Sorted set: open sessions of one client key, by time. Kept for a limit of those."""
    return f"{OPEN}:{owner}"


def bucket(limit: str, owner: str) -> str:
    """String: when the bucket of this limit and client key is empty, by Redis' clock."""
    return f"weir:b:{limit}:{owner}"
