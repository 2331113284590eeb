"""Every Redis key that Weir uses, in one place."""

STREAM = "weir:stream"
"""Turns, rewards, late joins, outcomes and deletions, in the order in which they became durable."""
STREAM_FIELD = b"r"
GROUP = "trainer"
CONSUMER = "trainer-0"
"""Fixed, and not a host name, so that a restarted trainer finds its pending entries."""

DEAD_LETTERS = "weir:dead"
"""Stream: entries that the trainer could not decode, with their bytes and the error."""

SESSIONS = "weir:sessions"
"""Sorted set: session id by creation time."""
DEADLINES = "weir:deadlines"
"""Sorted set: unfinished session id by expiry time."""
VERDICTS = "weir:verdicts"
"""Hash: how many sessions and turns ended with which verdict ("session:trained", "turn:stale", …)."""
SETTLED = "weir:settled"
"""Sorted set: session with a verdict, by the time of the verdict, in ms by the stream's clock (SETTLE)."""
FORGOTTEN = "weir:forgotten"
"""Hash: how many of the sessions and turns that VERDICTS counts were removed by retention ("session:trained",
"turn:stale", …); and how many trained tokens they had ("tokens:trained")."""
FORGOTTEN_IDS = "weir:forgotten_ids"
"""Sorted set: the last sessions ("s:…") and groups ("g:…") that retention has removed, by time."""
TRAINER = "weir:trainer"
"""Hash: the trainer's last status report."""
LEASE = "weir:trainer_lease"
"""String: the process that trains, JSON (`holder`); expires unless that process renews it."""
FENCE = "weir:trainer_fence"
"""String: the token of the process that claimed the lease last; does not expire."""
POLICIES = "weir:policies"
"""Hash: version → policy, JSON."""
RESERVED = "weir:policy_reserved"
"""Hash: the highest `version` that the trainer has reserved, the `location` of its weights, and the locations
of earlier reservations by number."""
REMOVED = "weir:policies_removed"
"""Set: versions whose files were removed."""
SERVING = "weir:serving"
"""String: the serving plan, JSON: versions that may answer calls, the last push, the hold."""
SERVER_PUSHES = "weir:server_pushes"
"""Hash: rollout server id → what it does in the last push, JSON."""
PUSHES = "weir:pushes"
"""List: the last pushes that ended, JSON, the newest first."""
CANARIES = "weir:canaries"
"""List: the last canaries that ended, JSON, the newest first."""
CANARY_LOG = "weir:canary_log"
"""Stream: the calls and scores of the last canary, in `record`."""
CANARY_REPORT = "weir:canary_report"
"""String: the numbers of the canary that is open, JSON."""
PUSH_LEASE = "weir:push_lease"
"""String: the token of the gateway process that drives pushes; expires unless that process renews it."""
ADAPTERS = "weir:adapters"
"""Hash: `name@version` → adapter that is a policy of its own, JSON."""
ADAPTER_VERSIONS = "weir:adapter_versions"
"""Hash: name → the last version that an adapter of this name has had."""
ADAPTERS_REVISION = "weir:adapters_revision"
"""String: a number that grows with each change of ADAPTERS."""
SERVERS = "weir:rollout_servers"
"""Hash: rollout server id → registration, JSON."""
HELD = "weir:rollout_servers_held"
"""Set: rollout servers that an operator took out of rotation."""
SECRET = "weir:secret"  # noqa: S105 - the name of a key, not a secret
"""String: signs session keys, so that they need not be stored."""
KEYS = "weir:keys"
"""Hash: name → API key that an operator made, JSON, with digests in place of its secrets."""
KEYS_CHANGED = "weir:keys_changed"
"""String: the id of the last change of KEYS, so that gateways read KEYS only after a change."""
KEYS_USED = "weir:keys_used"
"""Hash: name of an API key → when it was used last, in seconds since the epoch."""
KEYS_TOKENS = "weir:keys_tokens"
"""Hash: name of an API key → how many tokens its calls have used."""
ADMIN_ACTIONS = "weir:admin_actions"
"""Stream: the last requests with an admin key that may have changed something."""
OPEN = "weir:open"
"""Sorted set: open sessions, by time. Kept while the number of open sessions is limited."""
UNTRAINED = "weir:untrained"
"""Sorted set: sessions for training that have no verdict, by time. Kept while a staleness budget is set."""

DELETED = "weir:deleted"
"""Hash: deleted session id → tombstone, JSON."""
DELETING = "weir:deleting"
"""Sorted set: deleted sessions that may still have entries in the streams, by the time of the deletion."""
DELETED_USERS = "weir:deleted_users"
"""Set: SHA-256 of the names of users whose data was deleted."""


def session(session_id: str) -> str:
    """Hash of one session: `spec`, `outcome`, `verdict`, `t:{turn}`, `r:{reward key}`, `v:{turn}`, and
    `q:{request}` once a retry of that request is among the turns; `beat`, the last heartbeat; `magnitude`,
    the sum of its rewards' magnitudes. A session that was described late (DESCRIBE) has its time to live,
    `ttl`, what its outcome must say, `terms`, and the record of its group, `joined`."""
    return f"weir:s:{session_id}"


def group(group_id: str) -> str:
    """Hash of one group: `size`, `owner`, when it was `opened_at`, and how many members are `forgotten`
    (removed by retention)."""
    return f"weir:g:{group_id}"


def group_members(group_id: str) -> str:
    """Set: the session ids of one group."""
    return f"weir:g:{group_id}:members"


def user_sessions(user: str) -> str:
    """Set: the sessions that were opened for a user, or that hold a call that names the user."""
    return f"weir:u:{user}"


def continuation(owner: str, digest: str) -> str:
    """String: the session of `owner` that answered the conversation or the first call with this digest last.
    If `digest` is the id of a turn, the session that holds the turn."""
    return f"weir:c:{owner}:{digest}"


def response(response_id: str) -> str:
    """String: what one response adds to the conversation before it, for `previous_response_id`."""
    return f"weir:r:{response_id}"


def image(sha256: str) -> str:
    """String: the PNG with this hash, which turns show."""
    return f"weir:image:{sha256}"


def image_sessions(sha256: str) -> str:
    """Set: the sessions whose turns show the image. It is kept as long as any of them."""
    return f"weir:image_sessions:{sha256}"


def open_of(owner: str) -> str:
    """Sorted set: open sessions of one client key, by time. Kept while their number is limited."""
    return f"{OPEN}:{owner}"


def bucket(limit: str, owner: str) -> str:
    """String: when the bucket of this rate limit and client key will be empty, by Redis' clock."""
    return f"weir:b:{limit}:{owner}"


# Training commands

COMMANDS = "weir:commands"
"""Stream: the commands of all models, in the order in which they are carried out: `m`, the model; `n`, the
command's number; `c`, the command."""
COMMANDS_HELD = "weir:commands_held"
"""Hash: the `bytes` of all commands in the log, those of `unread` results, and the `most` of both."""
RESULTS_UNREAD = "weir:results_unread"
"""Sorted set: the results that nobody has read, with their sizes (`request|bytes`), by when they expire."""
RESULTS_ANNOUNCED = "weir:results_announced"
"""Stream: the commands that got their results last."""


def model(model_id: str) -> str:
    """Hash of one model that takes commands: `spec`, JSON; the number of the `next` command, and of the last
    one that is `done`; `d:{number}`, the digest of a command that has arrived, and `k:{number}`, its kind
    and when that was, in ms; `e:{number}`, a command that waits for earlier ones; `ended`, why it takes no
    more."""
    return f"weir:m:{model_id}"


def models_of(owner: str) -> str:
    """Sorted set: the models of one client key, by when they were made."""
    return f"weir:models:{owner}"


def client_session(session_id: str) -> str:
    """Hash: one run of a user's own training loop: `record`, JSON, or `deleted` or `forgotten` in its place
    until all that it has made is removed; `beat`, its last sign of life; how it `finished`."""
    return f"weir:cs:{session_id}"


CLIENT_SESSIONS_LIVE = "weir:client_sessions_live"
"""Sorted set: the client sessions whose models take commands, by their last sign of life."""
CLIENT_SESSIONS_ENDED = "weir:client_sessions_ended"
"""Sorted set: the client sessions whose models have ended, by when; and the models with named weights that
have outlasted theirs, by when somebody looked for these weights last."""

CLIENT_SESSIONS_DELETING = "weir:client_sessions_deleting"
"""Sorted set: the client sessions whose deletion has begun and not ended, by when it began."""


def client_sessions_of(owner: str) -> str:
    """Sorted set: the client sessions of one client key, by when they began."""
    return f"weir:client_sessions:{owner}"


def client_records_of_user(user: str) -> str:
    """Set: the client sessions that name a user, and the models with named weights that have outlasted
    theirs."""
    return f"weir:cu:{user}"


def made_in(session_id: str) -> str:
    """Set: the models and sampling sessions of one client session."""
    return f"weir:made:{session_id}"


def kept_terms(model_id: str) -> str:
    """Hash: what the client said of `{name}#{number of the command}`: how long it lives, its metadata."""
    return f"weir:kept_terms:{model_id}"


def sampling_target(sampling_session_id: str) -> str:
    """String: what a sampling session samples from, JSON."""
    return f"weir:st:{sampling_session_id}"


def sample_digest(request: str) -> str:
    """String: the digest of the request that a promise of a sample belongs to."""
    return f"weir:cd:{request}"


def result(request: str) -> str:
    """String: the result of a command or a sample; empty while the sample is made."""
    return f"weir:cr:{request}"


def kept(model_id: str) -> str:
    """Hash: what the commands of a model have made that lasts: `weights/{name}`, `sampler_weights/{name}`,
    `external_weights/{name}`."""
    return f"weir:kept:{model_id}"


DROPPED = "weir:dropped"
"""Hash: `{model}|{name}` of deleted weights → `{saved}>{deleted}`, two places in the log, for each deletion,
with spaces between: what was saved up to the first place is gone for commands after the second one. The name
`*` stands for a model that is gone, with all that it has saved."""
DROPPED_ADAPTERS = "weir:dropped_adapters"
"""Hash: `{policy}|{version}` of an adapter that no sampling session can name → the place in the log of the
command that made it. The trainer removes its files when no replay can reach that place."""
KEPT_EXPIRES = "weir:kept_expires"
"""Sorted set: `{model}|{name}|{number of the command}` of weights with a time to live, by when it is over."""
