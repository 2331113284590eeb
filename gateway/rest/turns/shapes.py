"""The shapes of turns in the replies of the REST routes."""

from typing import Any, Literal

from typing_extensions import TypedDict

from gateway.operators.prompt_reader import Role
from gateway.operators.training import TrainingShape
from rollout_queue.contract.records import Finish, Relation, VerdictCode


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

    role: Role
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
    """The number of turns by their relation to earlier turns (`turns/drift.py`), and of forks by reason."""

    extends: int
    rerendered: int
    forks: dict[str, int]
