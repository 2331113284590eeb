"""What travels through the stream: a turn, a reward, an outcome; and the session they belong to.

SessionSpec ─┬─ Turn ─ Turn ─ Turn      what was sampled, token by token
             │     └─ Turn              (a tree: a turn holds only what it adds to its parent)
             ├─ Reward, Reward          what it was worth; none yet is null, and null is not 0
             └─ Outcome                 how the episode ended
                Deletion                or that all of it was deleted
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.tokens import Logprobs, TokenIds

Finish = Literal["stop", "length", "tool_calls", "abort"]
Relation = Literal["root", "extends", "rerendered", "forks", "retry"]
Status = Literal["completed", "truncated", "failed", "abandoned"]
SamplingMode = Literal["enforce", "default", "allow"]


class Span(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Output tokens [start, end) were sampled by policy `version`."""

    version: int
    start: int
    end: int
    engine: str | None = None
    """Who sampled them, where more than one engine had a part in the answer; else it is the turn's."""


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """Sampling parameters: what the agent asked for, and what the engine was told."""

    asked: dict[str, Any] = {}
    used: dict[str, Any] = {}


# gc: a trainer holds a hundred thousand, none is part of a cycle, and the collector would look at them all.
class Turn(msgspec.Struct, frozen=True, tag="turn", kw_only=True, omit_defaults=True, gc=False):
    """One generation: the tokens it added to its parent, and everything needed to learn from them."""

    turn_id: str
    session_id: str
    parent_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    policy: str = "policy"
    attempt: int = 0
    """How often the client had made this call before, as far as it says."""
    joined_attempt: int = 0
    """The last later attempt that joined the call and heard its answer; 0 where none did."""
    joined_at: float = 0.0
    """When that attempt did."""
    lineage: str | None = None
    """A caller's label for the thread of calls inside a session, such as one of several sub-agents."""
    user: str | None = None
    """For whom the call says that it is made; whoever its session was opened for."""

    relation: Relation = "root"
    reason: str | None = None
    """Why the turn does not extend its session's conversation, where it does not."""

    context_ids: TokenIds
    """Tokens appended since the parent's end, int32; none of them is trained."""
    output_ids: TokenIds
    """Tokens sampled, as the engine returned them, the stop token included; each is trained once."""
    logprobs: Logprobs
    """log p of each output token under the distribution it was sampled from, float32, nats."""
    versions: tuple[Span, ...]
    """Which policy version sampled which output tokens: spans that tile [0, len(output_ids))."""

    sampling: Sampling = Sampling()
    finish: Finish
    train: bool = True
    started_at: float
    finished_at: float
    engine: str = ""
    completion_id: str = ""
    prompt_digest: str = ""
    """Chained digest of the canonical messages of the call, and `reply_digest` of those plus the answer:
    a later call that begins with the same messages finds its parent by it."""
    reply_digest: str = ""
    request_digest: str = ""
    """The same for the same bytes of a call: by it a retry finds the attempts before it."""
    retry_of: str | None = None
    """The turn of an earlier attempt that this one makes an orphan."""
    orphan_of: str | None = None
    """The retry that was recorded before this turn, and has replaced it."""

    @property
    def pinned(self) -> bool:
        """Whether its call, or its session, asked for one version and no other: `policy@12`."""
        return "@" in self.policy

    @property
    def last_attempt(self) -> int:
        """The attempt that was to hear this answer."""
        return max(self.attempt, self.joined_attempt)

    @property
    def asked_at(self) -> float:
        """When that attempt began."""
        return self.joined_at or self.started_at

    @property
    def request(self) -> tuple[str, str]:
        """What was asked; the prompts of one request are told apart."""
        return self.request_digest, self.prompt_digest

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.logprobs):
            raise InvalidRecord(
                f"turn {self.turn_id}: {len(self.output_ids)} output ids but {len(self.logprobs)} logprobs"
            )
        if not (self.context_ids.natural and self.output_ids.natural):
            raise InvalidRecord(f"turn {self.turn_id}: a token id is negative")
        if not self.logprobs.finite:
            raise InvalidRecord(f"turn {self.turn_id}: a logprob is not finite")
        end = 0
        for span in self.versions:
            if span.start != end or span.end < span.start:
                raise InvalidRecord(f"turn {self.turn_id}: version spans do not tile its output")
            end = span.end
        if end != len(self.output_ids):
            raise InvalidRecord(f"turn {self.turn_id}: version spans end at {end}, not at its last token")


class Reward(msgspec.Struct, frozen=True, tag="reward", kw_only=True, omit_defaults=True):
    """One reward for a session, or for the one turn it names. Rewards of a session add up."""

    session_id: str
    value: float
    key: str
    """Idempotency: the same key again changes nothing."""
    turn_id: str | None = None
    source: str | None = None
    created_at: float
    late: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise InvalidRecord(f"reward {self.key} of session {self.session_id} is not finite")


class Outcome(msgspec.Struct, frozen=True, tag="outcome", kw_only=True, omit_defaults=True):
    """How a session ended; it carries the group so that a session without any turn still counts in it."""

    session_id: str
    status: Status
    reason: str | None = None
    created_at: float
    group_id: str | None = None
    group_size: int | None = None
    task_id: str | None = None
    train: bool = True


class Deletion(msgspec.Struct, frozen=True, tag="deletion", kw_only=True, omit_defaults=True):
    """The session is gone, with everything the stream held of it. It carries the group so that the session
    still counts there, as one that ended without a rollout."""

    session_id: str
    created_at: float
    group_id: str | None = None
    group_size: int | None = None


Record = Turn | Reward | Outcome | Deletion


class SamplingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns the sampling parameters of a session's calls, and their values."""

    mode: SamplingMode = "enforce"
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a session was opened with. Two specs are the same session if `terms` are equal."""

    session_id: str
    owner: str = ""
    """Digest of the client key that made it; empty in the loopback mode without keys."""
    task_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    policy: str | None = None
    user: str | None = None
    train: bool = True
    ttl_s: float = 3600.0
    metadata: dict[str, Any] = {}
    lineage: str | None = None
    sampling: SamplingPolicy = SamplingPolicy()
    created_at: float
    inferred: bool = False

    def terms(self) -> Mapping[str, Any]:
        """What a repeated creation must agree on: everything but when and by which way it was created."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["created_at"], fields["inferred"]
        return fields


VerdictCode = Literal[
    "open",
    "waiting_reward",
    "group_incomplete",
    "ready",
    "trained",
    "stale",
    "zero_advantage",
    "truncated",
    "failed",
    "abandoned",
    "expired",
    "orphan_retry",
    "aborted",
    "not_for_training",
    "invalid",
    "deleted",
]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a session or a turn, and why."""

    code: VerdictCode
    detail: str = ""
    step: int | None = None
    """The optimizer step that trained it."""
    version: int | None = None
    """The policy version that the step produced."""
