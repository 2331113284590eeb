"""The objects in the replies of the REST routes; FastAPI publishes them in its OpenAPI document.

The shapes of turns in the replies of the REST routes.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from gateway.operators.lineage import TrainingShape
from gateway.operators.prompt_reader import PromptRole
from rollout_queue.contract.head import SessionState
from rollout_queue.contract.records import (
    Finish,
    PastThoughts,
    ReasoningEffort,
    Relation,
    Status,
    VerdictCode,
)
from rollout_queue.http.callers import Role


class TurnVerdictShape(TypedDict):
    code: VerdictCode
    detail: str


class VersionRange(TypedDict):
    """The oldest and the newest version that sampled a token of a session."""

    first: int
    last: int


class SpanShape(TypedDict):
    """Output tokens [start, end) were sampled by `version`."""

    version: int
    start: int
    end: int


class SamplingShape(TypedDict):
    asked: dict[str, Any]
    used: dict[str, Any]


class FunctionShape(TypedDict):
    name: str
    arguments: str
    """As the model wrote them; they may not be JSON."""


class ToolCallShape(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionShape


class ImageShape(TypedDict):
    """An image that a turn's prompt shows, and its place among the turn's `context_ids`."""

    sha256: str
    start: int
    end: int
    width: int
    height: int
    grid: list[int]


class MessageShape(TypedDict):
    """An answer, with the names of chat completions."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str | None
    tool_calls: list[ToolCallShape]


class ConversationMessage(TypedDict):
    """A message of a conversation, as it is read back from tokens. `prompt`: the chat template does not say
    whose text it is."""

    role: PromptRole
    content: str
    reasoning_content: str | None
    tool_calls: list[ToolCallShape]
    images: list[int]
    """The images that it shows, by their places in the turn's `images`."""
    left_out: int
    """How many characters of its texts are left out."""


class WindowShape(TypedDict):
    """The tokens [start, end) of a turn that a reply shows, counted from the first token of the context."""

    start: int
    end: int


class UntrainedShape(WindowShape):
    """Tokens of a turn that changed no weight, and why."""

    why: str


class TurnExtras(TypedDict, total=False):
    """Fields of a turn that are present only on request: `tokens=true`, `text=true`, `token_texts=true`,
    `messages=true`, `token_start` and `token_end`."""

    window: WindowShape

    context_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    training: TrainingShape | None
    untrained: list[UntrainedShape]
    context_token_texts: list[str | None]
    """A null belongs to the character of the token before it."""
    output_token_texts: list[str | None]
    context_text: str
    output_text: str
    message: MessageShape
    messages: list[ConversationMessage]
    """What the turn adds to its parent's conversation, its answer last."""
    messages_left_out: int
    """How many older messages of its context are not shown."""


class TurnShape(TurnExtras):
    turn_id: str
    parent_id: str | None
    completion_id: str
    relation: Relation
    reason: str | None
    side_call: str | None
    ignored_fields: list[str]
    """The paths of fields of the call that the gateway did not know, and ignored."""
    context_len: int
    output_len: int
    finish_reason: Finish
    created_at: float
    engine: str
    lineage: str | None
    versions: list[SpanShape]
    sampling: SamplingShape
    reward: float | None
    verdict: TurnVerdictShape
    why: str | None
    """Why the turn is not trained, or not yet; null if it is."""
    images: list[ImageShape]


class Drift(TypedDict):
    """The number of turns by their relation to earlier turns (`drift_of`), and of forks by reason."""

    extends: int
    rerendered: int
    forks: dict[str, int]


class NewSession(TypedDict):
    """A new session. An agent's OpenAI client takes its `base_url` and `api_key` unchanged."""

    session_id: str
    api_key: str
    base_url: str
    group_id: str | None
    task_id: str | None
    policy: str
    state: Literal["open"]
    created_at: float
    expires_at: float


class NewGroup(TypedDict):
    group_id: str
    sessions: list[NewSession]
    notice: str | None
    """Why the group will probably not be trained; null if nothing is known."""


class RewardShape(TypedDict):
    value: float
    turn_id: str | None
    key: str
    source: str | None
    created_at: float
    late: bool


class Rewarded(TypedDict):
    session_id: str
    reward: float | None
    rewards: list[RewardShape]
    late: bool


class VerdictShape(TurnVerdictShape):
    """How a session ended, or what it waits for. `step` and `version` are null if it was not trained."""

    step: int | None
    version: int | None


class Finished(TypedDict):
    session_id: str
    state: SessionState
    status: Status
    reward: float | None
    verdict: VerdictShape


class SessionFacts(TypedDict):
    """The fields of every view of a session."""

    session_id: str
    state: SessionState
    status: Status | None
    inferred: bool
    group_id: str | None
    group_size: int | None
    task_id: str | None
    policy: str
    user: str | None
    metadata: dict[str, Any]
    reasoning_effort: ReasoningEffort | None
    thinking: PastThoughts | None
    reward: float | None
    rewards: list[RewardShape]
    created_at: float
    expires_at: float
    verdict: VerdictShape


class SessionRow(SessionFacts):
    """A session in a list: sums over its turns in place of the turns."""

    turn_count: int
    output_len: int
    """How many tokens were sampled."""
    versions: VersionRange | None
    """None if no token was sampled."""


class DeletedSessionRow(TypedDict):
    """A deleted session in a list."""

    session_id: str
    created_at: float
    deleted_at: float
    verdict: VerdictShape


class SessionShape(SessionFacts):
    """A whole session; token lists with `tokens=true`, texts with `text=true`."""

    why: str | None
    """Why the session is not trained, or not yet; null if it is."""

    merge_ratio: float | None
    drift: Drift
    turns: list[TurnShape]


class SessionPage(TypedDict):
    """`looked_at` is how many sessions were compared with the filter, and `looked_until` the age of the last
    of them: a page may be empty although more sessions follow."""

    data: list[SessionRow | DeletedSessionRow]
    next_cursor: str | None
    looked_at: int
    looked_until: float | None


class Counts(TypedDict):
    turns: int
    rewards: int


class DeletedSession(TypedDict):
    session_id: str
    deleted: Counts


class UserCounts(Counts):
    sessions: int
    client_sessions: int


class ClientSessionCounts(TypedDict):
    models: int
    weights: int
    samplers: int
    samples: int


class DeletedClientSession(TypedDict):
    session_id: str
    deleted: ClientSessionCounts


class DeletedUserShape(TypedDict):
    user: str
    deleted: UserCounts


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Tokens that a prompt and its answer may have; the name is vLLM's."""
    version: int | None
    """The newest version that answers under this name; null if none does."""
    notice: NotRequired[str]
    """What whoever trains this model should know, for an hour: that its training is paused, or went back."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Removed(TypedDict):
    id: str
    removed: bool


class HeartbeatReply(TypedDict):
    """When the session expires if no call or heartbeat follows."""

    session_id: str
    expires_at: float


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class KeySecret(TypedDict):
    """One secret of a key, by the first eight digits of its SHA-256."""

    sha256: str
    created_at: float | None
    expires_at: float | None


class KeyShape(TypedDict):
    """An API key without its secrets. `tokens_used` are those of prompts and answers, in all."""

    name: str
    role: Role
    source: Literal["settings", "file", "admin"]
    secrets: list[KeySecret]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    token_budget: int | None
    tokens_used: int
    created_at: float | None
    last_used_at: float | None
    revoked_at: float | None


class KeyPage(TypedDict):
    data: list[KeyShape]


class NewKeySecret(TypedDict):
    """A new secret of a key, for `Authorization: Bearer` or `x-api-key`. No other reply has it."""

    name: str
    role: Role
    api_key: str


class ActionShape(TypedDict):
    """One request with an admin key that may have changed something."""

    id: str
    at: float
    key: str
    method: str
    path: str
    status: int
    request_id: str
    client: str


class ActionPage(TypedDict):
    data: list[ActionShape]
