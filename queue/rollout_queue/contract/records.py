"""The records of the stream: turn, reward, outcome and deletion; and the session that they belong to.

SessionSpec ─┬─ Turn ─ Turn ─ Turn      the sampled tokens; turns form a tree, and each holds only the tokens
             │     └─ Turn              that it adds to its parent
             ├─ Reward, Reward          rewards add up; without any, the reward is null, which is not 0
             ├─ LateJoin                the session got its group after its first call
             ├─ Outcome                 how the session ended
             └─ Deletion                the session was deleted

A session says how to sample; SamplingPolicy says whether the logprobs are those of the sampled distribution.

RoutedExperts are the experts that an engine chose for the tokens of a turn, in a mixture of experts.

    prompt and output of a turn     a b c d e f g h
    rows, if b begins the turn      a b c d e f g        the last token passed through no expert

Each row belongs to a token, and so to the prediction of the token after it.

TurnImages are the images that a turn's context shows, and where they lie among its tokens.

    context_ids of a turn    user, look, start, pad, pad, pad, pad, end, …
    the image's span                            [3,            7)

The bytes lie once in the store, by their hash (`StreamWriter.append_turn`).
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds

SamplingMode = Literal["exact", "enforce", "default", "allow"]

WITHOUT_EFFECT: Mapping[str, Any] = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
}
"""The values of sampling parameters with which the engine samples from softmax(logits / temperature)."""

GREEDY_BELOW = 1e-6
"""At a lower temperature SGLang takes the most likely token, and reports the logprobs of temperature 1."""


def is_greedy(temperature: float) -> bool:
    return temperature < GREEDY_BELOW


def temperature_of_logprobs(used: Mapping[str, Any]) -> float:
    """The temperature at which the engine computed the recorded logprobs."""
    temperature = float(used.get("temperature", 1.0))
    return 1.0 if is_greedy(temperature) else temperature


def inexact(used: Mapping[str, Any]) -> list[str]:
    """The used sampling parameters, each with its value, that make the recorded logprobs differ from those
    of the sampled distribution."""
    found = [name for name, value in WITHOUT_EFFECT.items() if used.get(name, value) != value]
    shown = [name if name == "logit_bias" else f"{name} {used[name]}" for name in found]
    temperature = used.get("temperature", 1.0)
    return shown + ([f"temperature {temperature:g}"] if is_greedy(temperature) else [])


class SamplingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a session's calls. `named_mode` says when they apply."""

    mode: Literal["enforce", "default", "allow"] = "enforce"
    """`enforce`: always. `default`: unless the call gives its own. `allow`: as `default`, and the call may
    give penalties, too. In every mode, the smaller `max_tokens` of the session and the call applies."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    own_temperature: bool = False
    """With `enforce`: but for a call's temperature at which logprobs are exact. Together they are the mode
    `exact`, in a form that earlier releases of this schema read."""

    @classmethod
    def of(cls, mode: SamplingMode, **parameters: Any) -> "SamplingPolicy":
        if mode == "exact":
            return cls(mode="enforce", own_temperature=True, **parameters)
        return cls(mode=mode, **parameters)

    @property
    def named_mode(self) -> SamplingMode:
        """The mode, by the name that users know."""
        return "exact" if self.own_temperature else self.mode


class RoutedExperts(msgspec.Struct, frozen=True, gc=False):
    """The experts of consecutive tokens. The last row belongs to the token before the turn's last one."""

    width: int
    """How many experts one token passed through: those of the first layer, then those of the next ones."""
    item_bytes: int
    """1 or 2: the bytes of one expert's number, little-endian."""
    packed: bytes

    @property
    def rows(self) -> int:
        return len(self.packed) // (self.width * self.item_bytes)

    def __post_init__(self) -> None:
        if self.item_bytes not in (1, 2) or self.width < 1:
            raise InvalidRecord(f"routed experts of {self.width} times {self.item_bytes} bytes")
        if len(self.packed) % (self.width * self.item_bytes):
            raise InvalidRecord("routed experts that are no whole number of rows")

    @classmethod
    def of_int32(cls, numbers: bytes, rows: int) -> Self:
        """Packs little-endian int32 of `rows` tokens. Raises ValueError if they are no numbers of experts."""
        width, rest = divmod(len(numbers) // 4, rows) if rows > 0 else (0, 0)
        if not width or rest or len(numbers) % 4:
            raise ValueError(f"{len(numbers)} bytes of experts for {rows} tokens")
        low, second = numbers[0::4], numbers[1::4]
        if numbers[2::4].strip(b"\0") or numbers[3::4].strip(b"\0"):
            raise ValueError("the number of an expert is negative, or above 65535")
        if not second.strip(b"\0"):
            return cls(width, 1, low)
        packed = bytearray(2 * len(low))
        packed[0::2], packed[1::2] = low, second
        return cls(width, 2, bytes(packed))

    def last(self, rows: int) -> Self:
        """The last rows of these."""
        row_bytes = self.width * self.item_bytes
        return type(self)(self.width, self.item_bytes, self.packed[max(0, self.rows - rows) * row_bytes :])


SHA256 = re.compile("[0-9a-f]{64}")


class TurnImage(msgspec.Struct, frozen=True, gc=False):
    """One image as the engine got it: a PNG in RGB, of a size that the model's processor leaves as it is."""

    sha256: str
    """Of the PNG's bytes, in hexadecimal digits."""
    start: int
    """Its pads are the tokens [start, end) of the turn's `context_ids`."""
    end: int
    width: int
    """In pixels."""
    height: int
    grid: tuple[int, int, int]
    """Patches in time, height and width; several patches make one token."""

    def __post_init__(self) -> None:
        sizes = (self.end - self.start, self.width, self.height, *self.grid)
        if not SHA256.fullmatch(self.sha256) or self.start < 0 or min(sizes) < 1:
            raise InvalidRecord(f"the image {self.sha256[:64]} at [{self.start}, {self.end}) is malformed")

    def moved(self, tokens: int) -> "TurnImage":
        """The image in a sequence that has so many more tokens before it."""
        return msgspec.structs.replace(self, start=self.start + tokens, end=self.end + tokens)


def check_places(images: tuple[TurnImage, ...], tokens: int) -> None:
    """Raises InvalidRecord if images overlap, or do not lie within so many tokens in their order."""
    end = 0
    for image in images:
        if image.start < end or image.end > tokens:
            raise InvalidRecord(f"image {image.sha256} does not lie in its turn's context")
        end = image.end


Finish = Literal["stop", "length", "tool_calls", "abort"]
Relation = Literal["root", "extends", "rerendered", "forks", "retry"]
Status = Literal["completed", "truncated", "failed", "abandoned"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""In rising order; `none` turns thinking off, and every other effort turns it on."""
PastThoughts = Literal["template", "all"]
"""Which earlier thoughts a prompt keeps: those that the chat template keeps, or all."""


class Span(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Output tokens [start, end) were sampled by policy `version`."""

    version: int
    start: int
    end: int
    engine: str | None = None
    """The engine that sampled them, if several engines made the answer; None means the turn's `engine`."""


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """Sampling parameters: as the agent sent them, and as they were sent to the engine."""

    asked: dict[str, Any] = {}
    used: dict[str, Any] = {}


# gc=False: turns form no cycles, and the garbage collector would visit all 100,000 that a trainer may hold.
class Turn(msgspec.Struct, frozen=True, tag="turn", kw_only=True, omit_defaults=True, gc=False):
    """One generation: the tokens it added to its parent, and everything needed to learn from them."""

    turn_id: str
    session_id: str
    parent_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    policy: str = "policy"
    attempt: int = 0
    """How often the client had made this call before, as its header says; 0 for the first attempt."""
    joined_attempt: int = 0
    """The last retry that joined this call while it ran and got the same answer; 0 if none did."""
    joined_at: float = 0.0
    """When that retry joined, seconds since the epoch."""
    lineage: str | None = None
    """A caller's label for the thread of calls inside a session, such as one of several sub-agents."""
    user: str | None = None
    """The user that the call names; the session may have been opened for another one."""
    ignored_fields: tuple[str, ...] = ()
    """The paths of fields of the call that the gateway did not know, and ignored."""
    relation: Relation = "root"
    reason: str | None = None
    """Why the turn does not extend its session's conversation; None if it does."""
    side_call: str | None = None
    """What the agent's harness asked for itself, such as a title; None for a call of the agent."""

    context_ids: TokenIds
    """int32, the tokens between the parent's last token and the first sampled one; not trained."""
    output_ids: TokenIds
    """int32, the sampled tokens as the engine returned them, with the stop token; each is trained once."""
    logprobs: Logprobs
    """float32, nats: log p of each output token under the distribution that it was sampled from."""
    versions: tuple[Span, ...]
    """Which policy version sampled which output tokens; the spans tile [0, len(output_ids))."""
    sampling: Sampling = Sampling()
    finish: Finish
    train: bool = True
    started_at: float
    finished_at: float
    engine: str = ""
    completion_id: str = ""
    prompt_digest: str = ""
    """Chained digest of the canonical messages of the call."""
    reply_digest: str = ""
    """Chained digest of the messages and the answer, by which a later call finds its parent."""
    request_digest: str = ""
    """Digest of the bytes of the call; a retry finds earlier attempts by it."""
    retry_of: str | None = None
    """The turn of an earlier attempt that this turn replaces; the replaced turn is an orphan."""
    orphan_of: str | None = None
    """The retry that was recorded before this turn and has replaced it."""
    experts: RoutedExperts | None = None
    """The experts that the engine chose, from the parent's last token on; None if they are not known."""
    images: tuple[TurnImage, ...] = ()
    """The images among `context_ids`, in the order of their places."""
    trace: str | None = None
    """The span that recorded the turn, as W3C's traceparent; None if it is not traced."""

    @property
    def pinned(self) -> bool:
        """Whether the call or the session asked for one fixed version, as in `policy@12`."""
        return "@" in self.policy

    @property
    def last_attempt(self) -> int:
        """The last attempt that gets this answer."""
        return max(self.attempt, self.joined_attempt)

    @property
    def asked_at(self) -> float:
        """When `last_attempt` began, seconds since the epoch."""
        return self.joined_at or self.started_at

    @property
    def request(self) -> tuple[str, str]:
        """Identifies one prompt. A request may hold several."""
        return self.request_digest, self.prompt_digest

    @property
    def continuation_digests(self) -> list[str]:
        """The digests, or the turn id, by which a later call finds the session of this turn."""
        digests = [self.reply_digest] if self.reply_digest else []
        if self.finish == "tool_calls":
            digests.append(self.turn_id)
        if self.request_digest and self.parent_id is None:
            digests.append(self.request_digest)
        return digests

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.logprobs):
            raise InvalidRecord(
                f"turn {self.turn_id}: {len(self.output_ids)} output ids but {len(self.logprobs)} logprobs"
            )
        if not (self.context_ids.natural and self.output_ids.natural):
            raise InvalidRecord(f"turn {self.turn_id}: a token id is negative")
        if not self.logprobs.finite:
            raise InvalidRecord(f"turn {self.turn_id}: a logprob is not finite")
        most = len(self.context_ids) + len(self.output_ids) - (self.parent_id is None)
        if self.images:
            check_places(self.images, len(self.context_ids))
        if self.experts is not None and self.experts.rows > most:
            raise InvalidRecord(f"turn {self.turn_id}: experts of {self.experts.rows} tokens, not {most}")
        end = 0
        for span in self.versions:
            if span.start != end or span.end < span.start:
                raise InvalidRecord(f"turn {self.turn_id}: version spans do not tile its output")
            end = span.end
        if end != len(self.output_ids):
            raise InvalidRecord(f"turn {self.turn_id}: version spans end at {end}, not at its last token")


class Reward(msgspec.Struct, frozen=True, tag="reward", kw_only=True, omit_defaults=True):
    """One reward of a session, or of one of its turns. The rewards of a session add up."""

    session_id: str
    value: float
    key: str
    """Idempotency key: a second reward with the same key is ignored."""
    turn_id: str | None = None
    source: str | None = None
    created_at: float
    late: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise InvalidRecord(f"reward {self.key} of session {self.session_id} is not finite")


class LateJoin(msgspec.Struct, frozen=True, tag="late_join", kw_only=True, omit_defaults=True):
    """A session that a call had opened got its group. Turns that it had before do not name the group."""

    session_id: str
    created_at: float
    group_id: str
    group_size: int | None = None


class Outcome(msgspec.Struct, frozen=True, tag="outcome", kw_only=True, omit_defaults=True):
    """How a session ended. The record names the group, so that a session without turns is a member, too."""

    session_id: str
    status: Status
    reason: str | None = None
    created_at: float
    group_id: str | None = None
    group_size: int | None = None
    task_id: str | None = None
    train: bool = True


class Deletion(msgspec.Struct, frozen=True, tag="deletion", kw_only=True, omit_defaults=True):
    """The session and its entries were deleted. In its group it counts as a member without a rollout."""

    session_id: str
    created_at: float
    group_id: str | None = None
    group_size: int | None = None


Record = Turn | Reward | LateJoin | Outcome | Deletion


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a session was opened with. A repeated creation of the session must have the same `terms`."""

    session_id: str
    """Unique in the deployment."""
    name: str | None = None
    """The id by which its owner knows it, if that is not `session_id`: another key's session has that one."""
    owner: str = ""
    """The client key that opened it: its name, or the digest of a key without one; empty for an admin."""
    task_id: str | None = None
    group_id: str | None = None
    """Unique in the deployment."""
    group_name: str | None = None
    """The id by which its owner knows the group, if that is not `group_id`, as for `name`."""
    group_size: int | None = None
    policy: str | None = None
    user: str | None = None
    train: bool = True
    train_side_calls: bool = True
    """Whether requests that the agent's harness makes for itself are trained."""
    ttl_s: float = 3600.0
    metadata: dict[str, Any] = {}
    lineage: str | None = None
    sampling: SamplingPolicy = SamplingPolicy()
    reasoning_effort: ReasoningEffort | None = None
    """The effort of calls that ask for none themselves; None leaves it to the chat template."""
    thinking: PastThoughts | None = None
    """None leaves it to the deployment."""
    created_at: float
    inferred: bool = False
    implicit: bool = False
    """A call opened it, and no client has described it yet (`StreamWriter.describe_session`)."""

    @property
    def shown_id(self) -> str:
        """The id by which the owner knows the session."""
        return self.name or self.session_id

    @property
    def shown_group(self) -> str | None:
        """The id by which the owner knows the group."""
        return self.group_name or self.group_id

    def terms(self) -> Mapping[str, Any]:
        """What a repeated creation must agree on: all but how and when it was opened."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["created_at"], fields["inferred"], fields["implicit"], fields["group_name"]
        return fields | {"group_id": self.shown_group}


VerdictCode = Literal[
    "open",
    "waiting_reward",
    "group_incomplete",
    "ready",
    "trained",
    "stale",
    "skipped_for_newer",
    "too_long",
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
    """What became of a session or a turn, and why.

    A stored verdict is final. `open`, `waiting_reward` and `ready` are never stored: a gateway gives them to
    a session that has no verdict yet.
    """

    code: VerdictCode
    detail: str = ""
    step: int | None = None
    """The optimizer step that trained it."""
    version: int | None = None
    """The policy version that the step produced."""
