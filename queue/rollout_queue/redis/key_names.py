"""The name of every Redis key that Weir uses, and its prefix.

Where a deployment's prefix is not `weir`, it is replaced when a command is packed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from redis.crc import key_slot

PREFIX = "weir"
"""What all names begin with, unless the setting `redis_key_prefix` says otherwise."""


class Key(str):
    """The name of a key, or the beginning of one. For a deployment with another prefix, `redis_client.py`
    replaces PREFIX in arguments of this type, and in no others, when a command is packed."""

    __slots__ = ()
    kind = ""
    """The type of the value, as TYPE calls it. A value of another type is not Weir's (`losses.py`)."""

    @property
    def aside(self) -> "Key":
        """Where a value of another type is moved."""
        return Key(f"{PREFIX}:aside:{self.removeprefix(PREFIX + ':')}")


class String(Key):
    kind = "string"


class Hash(Key):
    kind = "hash"


class Set(Key):
    kind = "set"


class SortedSet(Key):
    kind = "zset"


class List(Key):
    kind = "list"


class Stream(Key):
    kind = "stream"


SCHEMA = String("weir:schema")
"""String: the schema of the newest release that has used this Redis (`schema_version.py`)."""
STREAM = Stream("weir:stream")
"""Stream: turns, rewards, late joins, outcomes and deletions, in the order in which they became durable."""
STREAM_FIELD = b"r"
GROUP = "trainer"
CONSUMER = "trainer-0"
"""Fixed, and not a host name, so that a restarted trainer finds its pending entries."""
DEAD_LETTERS = Stream("weir:dead")
"""Stream: entries that the trainer could not decode, with their bytes and the error."""

SESSIONS = SortedSet("weir:sessions")
"""Sorted set: session id by creation time."""
DEADLINES = SortedSet("weir:deadlines")
"""Sorted set: id of a session without a verdict, by expiry time."""
VERDICTS = Hash("weir:verdicts")
"""Hash: how many sessions and turns ended with which verdict ("session:trained", "turn:stale", …)."""
SETTLED = SortedSet("weir:settled")
"""Sorted set: session with a verdict, by the time of the verdict, in ms by the stream's clock (SETTLE)."""
TRAINED = SortedSet("weir:trained")
"""Sorted set: trained session, by the version that its step made."""
STEPS = SortedSet("weir:steps")
"""Sorted set: durable step, JSON (`TrainedStep`), by the version that it made; the last ones."""
FORGOTTEN = Hash("weir:forgotten")
"""Hash: how many of the sessions and turns that VERDICTS counts were removed by retention ("session:trained",
"turn:stale", …); and how many trained tokens they had ("tokens:trained")."""
FORGOTTEN_IDS = SortedSet("weir:forgotten_ids")
"""Sorted set: the last sessions ("s:…") and groups ("g:…", "o:owner:…") that retention removed, by time."""
TRAINER = Hash("weir:trainer")
"""Hash: the trainer's last status report."""
LEASE = String("weir:trainer_lease")
"""String: the process that trains, JSON (`holder`); expires unless that process renews it."""
FENCE = String("weir:trainer_fence")
"""String: the token of the process that claimed the lease last; does not expire."""
POLICIES = Hash("weir:policies")
"""Hash: version → policy, JSON."""
RESERVED = Hash("weir:policy_reserved")
"""Hash: the highest `version` that the trainer has reserved, its `location`, and earlier ones by number."""
REMOVED = Set("weir:policies_removed")
"""Set: versions whose files were removed, at least the last 1000 of them."""
SERVING = String("weir:serving")
"""String: the serving plan, JSON: versions that may answer calls, the last push, the hold."""
SERVER_PUSHES = Hash("weir:server_pushes")
"""Hash: rollout server id → what it does in the last push, JSON."""
PUSHES = List("weir:pushes")
"""List: the last pushes that ended, JSON, the newest first."""
CANARIES = List("weir:canaries")
"""List: the last canaries that ended, JSON, the newest first."""
CANARY_LOG = Stream("weir:canary_log")
"""Stream: the calls and scores of the last canary, in `record`."""
CANARY_REPORT = String("weir:canary_report")
"""String: the numbers of the canary that is open, JSON."""
PUSH_LEASE = String("weir:push_lease")
"""String: the token of the gateway process that drives pushes; expires unless that process renews it."""
ADAPTERS = Hash("weir:adapters")
"""Hash: `name@version` → adapter that is a policy of its own, JSON."""
ADAPTER_VERSIONS = Hash("weir:adapter_versions")
"""Hash: name → the last version that an adapter of this name has had; no names of adapters that come back."""
ADAPTERS_REVISION = String("weir:adapters_revision")
"""String: a number that grows with each change of ADAPTERS."""
SERVERS = Hash("weir:rollout_servers")
"""Hash: rollout server id → registration, JSON."""
HELD = Set("weir:rollout_servers_held")
"""Set: rollout servers that an operator took out of rotation."""
SERVERS_CHANGED = String("weir:rollout_servers_changed")
"""String: the id of the last change of SERVERS but for its times: gateways read SERVERS only after one."""
LOADING = Set("weir:rollout_servers_loading")
"""Set: rollout servers that a gateway has load a version now: the others ask for their state often."""
SUSPECTS = SortedSet("weir:suspects")
"""Sorted set: digests of requests, `suspect:…` of killing an engine or `guilty:…`, by when it was noted."""
LASTING = Set("weir:lasting")
"""Set: the names of keys that exist, and that Weir never removes: if one is gone, its data was lost."""
LOSSES = Hash("weir:losses")
"""Hash: what of Redis' data was lost last, and what became of it: key → `Loss`, JSON."""
SECRET = String("weir:secret")
"""String: signs session keys, so that they need not be stored."""
KEYS = Hash("weir:keys")
"""Hash: name → API key that an operator made, JSON, with digests in place of its secrets."""
KEYS_CHANGED = String("weir:keys_changed")
"""String: the id of the last change of KEYS, so that gateways read KEYS only after a change."""
KEYS_USED = Hash("weir:keys_used")
"""Hash: name of an API key → when it was used last, in seconds since the epoch."""
KEYS_TOKENS = Hash("weir:keys_tokens")
"""Hash: name of an API key → how many tokens its calls have used."""
ADMIN_ACTIONS = Stream("weir:admin_actions")
"""Stream: the last requests with an admin key that may have changed something."""
OPEN = SortedSet("weir:open")
"""Sorted set: open sessions, by time. Kept while the number of open sessions is limited."""
UNTRAINED = SortedSet("weir:untrained")
"""Sorted set: sessions for training that have no verdict, by time. Kept while a staleness budget is set."""
DELETED = Hash("weir:deleted")
"""Hash: deleted session id → tombstone, JSON."""
DELETING = SortedSet("weir:deleting")
"""Sorted set: deleted sessions that may still have entries in the streams, by the time of the deletion."""
DELETED_USERS = Set("weir:deleted_users")
"""Set: SHA-256 of the names of users whose data was deleted."""


def trial(of: str) -> String:
    """String: a suspect and the server where it is tried, under a name `of` each; expires."""
    return String(f"weir:trial:{of}")


def beside_trial(server_id: str) -> Set:
    """Set: digests of the requests that may have killed a server beside the suspect that was tried there;
    expires."""
    return Set(f"weir:trial:beside:{server_id}")


def page_sessions_of(key_digest: str) -> SortedSet:
    """Sorted set: digests of the tokens of browsers that one API key has signed in, by their latest end."""
    return SortedSet(f"weir:page_sessions:{key_digest}")


def page_session(token_digest: str) -> String:
    """String: who is signed in on the page with a token, JSON; expires when the sign-in does."""
    return String(f"weir:page_session:{token_digest}")


def session(session_id: str) -> Hash:
    """Hash of one session: `spec`, `outcome`, `verdict`, `t:{turn}`, `r:{reward key}`, `v:{turn}`, and
    `n:{turn}`, what a step used of a trained turn's tokens (`TrainedTokens`); `q:{request}` once a retry of
    that request is among the turns; `e:{entry}`, its entries in STREAM; `beat`, the last heartbeat;
    `magnitude`, the sum of its rewards' magnitudes; `turns`, sums over its turns (`TurnSums`). One that was
    described late (DESCRIBE) has its time to live, `ttl`, the `terms` of its outcome, and `joined`."""
    return Hash(f"weir:s:{session_id}")


def group(group_id: str) -> Hash:
    """Hash of one group: `size`, `owner`, when it was `opened_at`, how many members were `forgotten`."""
    return Hash(f"weir:g:{group_id}")


def group_members(group_id: str) -> Set:
    """Set: the session ids of one group."""
    return Set(f"weir:g:{group_id}:members")


def user_sessions(user: str) -> Set:
    """Set: the sessions that were opened for a user, or that hold a call that names the user."""
    return Set(f"weir:u:{user}")


def continuation(owner: str, digest: str) -> String:
    """String: the session of `owner` that answered the conversation or the first call with this digest last.
    If `digest` is the id of a turn, the session that holds the turn."""
    return String(f"weir:c:{owner}:{digest}")


def response(response_id: str) -> String:
    """String: what one response adds to the conversation before it, for `previous_response_id`."""
    return String(f"weir:r:{response_id}")


def image(sha256: str) -> String:
    """String: the PNG with this hash, which turns show."""
    return String(f"weir:image:{sha256}")


def image_sessions(sha256: str) -> Set:
    """Set: the sessions whose turns show the image. It is kept as long as any of them."""
    return Set(f"weir:image_sessions:{sha256}")


def open_of(owner: str) -> SortedSet:
    """Sorted set: open sessions of one client key, by time. Kept while their number is limited."""
    return SortedSet(f"{OPEN}:{owner}")


def bucket(limit: str, owner: str) -> String:
    """String: when the bucket of this rate limit and client key will be empty, by Redis' clock."""
    return String(f"weir:b:{limit}:{owner}")


COMMANDS = Stream("weir:commands")
"""Stream: the commands of all models, in the order to carry out: `m`, model; `n`, number; `c`, command."""
COMMANDS_HELD = Hash("weir:commands_held")
"""Hash: the `bytes` of all commands in the log, those of `unread` results, and the `most` of both."""
RESULTS_UNREAD = SortedSet("weir:results_unread")
"""Sorted set: the results that nobody has read, with their sizes (`request|bytes`), by when they expire."""
RESULTS_ANNOUNCED = Stream("weir:results_announced")
"""Stream: the commands that got their results last."""


def model(model_id: str) -> Hash:
    """Hash of one model that takes commands: `spec`, JSON; the number of the `next` command, and of the last
    one that is `done`; `d:{number}`, the digest of a command that has arrived, and `k:{number}`, its kind
    and its time in ms; `e:{number}`, a command that waits for earlier ones; `ended`, why it takes no more."""
    return Hash(f"weir:m:{model_id}")


def models_of(owner: str) -> SortedSet:
    """Sorted set: the models of one client key, by when they were made."""
    return SortedSet(f"weir:models:{owner}")


def client_session(session_id: str) -> Hash:
    """Hash: one run of a user's own training loop: `record`, JSON, or `deleted` or `forgotten` in its place
    until all that it has made is removed; `beat`, its last sign of life; how it `finished`."""
    return Hash(f"weir:cs:{session_id}")


CLIENT_SESSIONS_LIVE = SortedSet("weir:client_sessions_live")
"""Sorted set: the client sessions whose models take commands, by their last sign of life."""
CLIENT_SESSIONS_ENDED = SortedSet("weir:client_sessions_ended")
"""Sorted set: the client sessions whose models have ended, by when; and the models with named weights that
have outlasted theirs, by when somebody looked for these weights last."""
CLIENT_SESSIONS_DELETING = SortedSet("weir:client_sessions_deleting")
"""Sorted set: the client sessions whose deletion has begun and not ended, by when it began."""


def client_sessions_of(owner: str) -> SortedSet:
    """Sorted set: the client sessions of one client key, by when they began."""
    return SortedSet(f"weir:client_sessions:{owner}")


def client_records_of_user(user: str) -> Set:
    """Set: the client sessions that name a user, and the models with named weights that outlasted theirs."""
    return Set(f"weir:cu:{user}")


def made_in(session_id: str) -> Set:
    """Set: the models and sampling sessions of one client session."""
    return Set(f"weir:made:{session_id}")


def kept_terms(model_id: str) -> Hash:
    """Hash: what the client said of `{name}#{number of the command}`: how long it lives, its metadata."""
    return Hash(f"weir:kept_terms:{model_id}")


def sampling_target(sampling_session_id: str) -> String:
    """String: what a sampling session samples from, JSON."""
    return String(f"weir:st:{sampling_session_id}")


def sample_digest(request: str) -> String:
    """String: the digest of the request that a promise of a sample belongs to."""
    return String(f"weir:cd:{request}")


def result(request: str) -> String:
    """String: the result of a command or a sample; empty while the sample is made."""
    return String(f"weir:cr:{request}")


def kept(model_id: str) -> Hash:
    """Hash: what the commands of a model have made that lasts: `weights/{name}`, `sampler_weights/{name}`,
    `external_weights/{name}`."""
    return Hash(f"weir:kept:{model_id}")


DROPPED = Hash("weir:dropped")
"""Hash: `{model}|{name}` of deleted weights → `{saved}>{deleted}`, two places in the log, for each deletion,
with spaces between: what was saved up to the first place is gone for commands after the second one. The name
`*` stands for a model that is gone, with all that it has saved."""
DROPPED_ADAPTERS = Hash("weir:dropped_adapters")
"""Hash: `{policy}|{version}` of an adapter that no sampling session can name → the place in the log of the
command that made it. The trainer removes its files when no replay can reach that place."""
KEPT_EXPIRES = SortedSet("weir:kept_expires")
"""Sorted set: `{model}|{name}|{number of the command}` of weights with a time to live, by when it is over."""


Rename = Callable[[Sequence[Any]], Sequence[Any]]


def wire_prefix(prefix: str, *, cluster: bool) -> str:
    """In a cluster the prefix is a hash tag, so that all keys of a deployment are in one slot."""
    return f"{{{prefix}}}" if cluster else prefix


def slot_of(prefix: str) -> int:
    return int(key_slot(prefix.encode()))


def renaming(prefix: str) -> Rename | None:
    """What replaces the keys among a command's arguments; None if they stay as they are."""
    if prefix == PREFIX:
        return None
    length = len(PREFIX)

    def rename(arguments: Sequence[Any]) -> Sequence[Any]:
        return tuple([prefix + each[length:] if isinstance(each, Key) else each for each in arguments])

    return rename
