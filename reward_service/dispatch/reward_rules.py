"""The settings `rewards.rules`: which sessions a grader rewards, and how it is called.

The first rule that matches a session rewards it, and no other rule does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, FiniteFloat, field_validator, model_validator

from reward_service.graders.grader_objects import MAX_SOURCE_CHARS, AnyGrader
from rollout_queue.settings import PlainUrl, SettingsPart

FINISH_KEY = "finish"
"""The gateway gives this key to the reward that comes with the end of a session."""


class SessionRule(SettingsPart):
    """What all rules have."""

    name: str = Field(pattern=r"^[A-Za-z0-9._:-]{1,100}$")
    """The key of its rewards."""
    task_prefix: str | None = None
    """Only sessions whose `task_id` begins so; null matches all."""
    metadata_grader: str | None = None
    """Only sessions with this value in `metadata.grader`; null matches all."""

    @field_validator("name")
    @classmethod
    def _own_key(cls, name: str) -> str:
        if name == FINISH_KEY:
            raise ValueError(f"{FINISH_KEY!r} is the key of the rewards that come with the end of a session")
        return name

    def matches(self, task_id: str | None, metadata: Mapping[str, Any]) -> bool:
        """Whether it is the rule of a session with this task and metadata."""
        prefix_matches = self.task_prefix is None or (task_id or "").startswith(self.task_prefix)
        return prefix_matches and self.metadata_grader in (None, metadata.get("grader"))


class EnvRule(SessionRule):
    """Sessions that their environment scores: nobody else does. They have a text in `metadata.environment`,
    as the runner of environments writes it."""

    kind: Literal["env"]

    def matches(self, task_id: str | None, metadata: Mapping[str, Any]) -> bool:
        """Whether an environment scores a session with this task and metadata."""
        return isinstance(metadata.get("environment"), str) and super().matches(task_id, metadata)


class RewardRule(SessionRule):
    """What all rules have that call a grader."""

    timeout_s: float = Field(60.0, gt=0)
    """How long one attempt may take."""
    attempts: int = Field(5, ge=1)
    """After so many failed attempts a session is a dead letter, which this service tries no more."""
    backoff_s: float = Field(2.0, gt=0)
    """The pause after a failed attempt; it doubles each time, up to `dispatch.backoff_limit_s`."""
    concurrency: int = Field(4, ge=1)
    """How many sessions it grades at once."""


class GroupRewardRule(RewardRule):
    """Rules that grade all sessions of a group at once leave those without a group to the next rule."""

    before_expiry_s: float = Field(300.0, ge=0)
    """A group with sessions that are still open is graded without them so long before the first of those that
    wait expires, and at most half of that session's life before."""
    most_members: int = Field(64, ge=2)
    """A group with more sessions is a dead letter."""
    most_chars: int = Field(400_000, ge=1)
    """A group whose texts have more characters is a dead letter."""


class HttpRule(GroupRewardRule):
    """A grader behind a URL."""

    kind: Literal["http"]
    per: Literal["session", "group"] = "session"
    """What one call grades."""
    url: PlainUrl
    """Where each session, or group, is posted."""
    api_key: str | None = None
    """Sent as `Authorization: Bearer …`."""
    rubric: str | None = None
    """Passed on to the grader."""


class PythonRule(RewardRule):
    """A function `grade(sample, item)`, in a process of its own."""

    kind: Literal["python"]
    source: str | None = Field(None, max_length=MAX_SOURCE_CHARS)
    """The source of the function `grade(sample, item)`."""
    source_file: Path | None = None
    """Read when the service starts."""

    @model_validator(mode="after")
    def _one_source(self) -> "PythonRule":
        if (self.source is None) == (self.source_file is None):
            raise ValueError("give source or source_file")
        return self

    def read_source(self) -> str:
        """Raises OSError, UnicodeDecodeError."""
        return self.source or (self.source_file.read_text(encoding="utf-8") if self.source_file else "")


class OpenAiGraderRule(RewardRule):
    """One of OpenAI's grader objects."""

    kind: Literal["openai_grader"]
    grader: AnyGrader
    """The grader, as an object of OpenAI's API."""


class JudgeRule(RewardRule):
    """A model that reads the whole episode."""

    kind: Literal["judge"]
    rubric: str = Field(min_length=1, max_length=100_000)
    """What makes an episode good. It may have variables, such as {{item.answer}}."""
    model: str = Field("policy", min_length=1, max_length=200)
    """The model that grades."""
    range: Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """The least and the largest reward."""

    @model_validator(mode="after")
    def _ordered(self) -> "JudgeRule":
        if self.range[0] >= self.range[1]:
            raise ValueError("range: the first number is the lower one")
        return self


class RelativeRule(GroupRewardRule):
    """A model that compares the sessions of a group."""

    kind: Literal["relative"]
    rubric: str = Field(min_length=1, max_length=100_000)
    """What makes an episode good."""
    model: str = Field("policy", min_length=1, max_length=200)
    """The model that grades."""
    seed: int = 0
    """Of the order in which the model reads the sessions."""


GraderRule = HttpRule | PythonRule | OpenAiGraderRule | JudgeRule | RelativeRule
AnyRule = Annotated[EnvRule | GraderRule, Discriminator("kind")]


class DispatchSettings(SettingsPart):
    """How sessions are found, and how much is kept of them."""

    poll_every_s: float = Field(2.0, gt=0)
    """The pause between two readings of the gateway's list."""
    page: int = Field(200, ge=1, le=1000)
    """Sessions in one answer of the gateway."""
    queue: int = Field(1000, ge=1)
    """Sessions that wait for one rule. Further ones are taken at a later reading."""
    remembered: int = Field(100_000, ge=1)
    """Sessions of which this service remembers that they failed, or that no grader has an opinion. With so
    many it takes no new ones, until some of these expire or are rewarded."""
    session_bytes: int = Field(16 * 2**20, ge=1024)
    """The largest session that is read; a larger one is a dead letter."""
    answer_bytes: int = Field(2**20, ge=1024)
    """The largest answer of an http grader."""
    backoff_limit_s: float = Field(60.0, gt=0)
    """The longest pause between two attempts."""
    gateway_timeout_s: float = Field(60.0, gt=0)
    """How long the gateway may take to answer."""
