"""The objects in the replies of the REST routes; FastAPI publishes them in its OpenAPI document."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from gateway.rest.turns.shapes import Drift, TurnShape, TurnVerdictShape, VersionRange
from rollout_queue.contract.head import SessionState
from rollout_queue.contract.records import PastThoughts, ReasoningEffort, Status
from rollout_queue.http.keys import Role


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
