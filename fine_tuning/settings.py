"""The section `fine_tuning` of the configuration, with every default."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from environments.settings import OF_LOOPS
from reward_service.judging import JudgeSettings
from reward_service.python_sandbox import PythonSettings
from rollout_queue.settings import (
    BOUND,
    FOR_TESTS,
    CommaSeparated,
    Hidden,
    HttpSettings,
    ServiceUrl,
    SettingsPart,
)

AS_IN_REWARDS = Hidden("the section `rewards` has the same fields, with what each changes")


class FineTuningLimits(SettingsPart):
    """Bounds on what is stored."""

    file_bytes: int = Field(64 * 2**20, ge=1024)
    """A larger file is a 413."""
    files: int = Field(1000, ge=1)
    """With so many files, uploads are refused."""
    stored_bytes: int = Field(4 * 2**30, ge=1024)
    """All files together; uploads that would exceed it are refused."""
    rows: int = Field(100_000, ge=1)
    """Of one file."""
    row_bytes: int = Field(2**20, ge=256)
    row_fields: int = Field(1000, ge=1)
    """Of one row, `messages` included."""
    messages: int = Field(256, ge=1)
    """Of one row."""
    jobs: int = Field(1000, ge=1)
    """Jobs that are kept. Beyond that, a new job takes the place of the oldest one that has ended."""
    events: int = Field(10_000, ge=16)
    """Events of a job that are kept, the newest ones."""


class FineTuningSettings(HttpSettings):
    """The service for fine-tuning jobs."""

    section: ClassVar[str] = "fine_tuning"

    port: int = 8400
    admin_keys: CommaSeparated = []
    """Every route needs one of them. The first one is also the key for the gateway."""
    client_keys: CommaSeparated = []
    """Keys that are known, and refused: jobs train the policy that all clients share."""
    gateway_url: ServiceUrl = "http://127.0.0.1:8000"
    directory: Path = Path("run/fine_tuning")
    """Where files, jobs and events are kept. One service uses it at a time."""
    group_size: int = Field(8, ge=2, le=1024)
    """Answers to one row that are compared, at a `compute_multiplier` of 1."""
    concurrency: int = Field(32, ge=1)
    """Answers that are sampled at once."""
    sampling: dict[str, Any] = {}
    """Parameters of chat completions for all answers, such as `max_tokens`."""
    answer_s: Annotated[float, FOR_TESTS] = Field(600.0, gt=0)
    """How long one answer and its grade may take."""
    gateway_wait_s: Annotated[float, FOR_TESTS] = Field(3600.0, gt=0)
    """How long a job waits for a gateway that is away, before it fails."""
    poll_every_s: Annotated[float, FOR_TESTS] = Field(2.0, gt=0)
    """The pause between two looks at the gateway's versions."""
    settle_s: Annotated[float, FOR_TESTS] = Field(20.0, ge=0)
    """After the last episode, a job ends when no new version has come for so long."""
    python: Annotated[PythonSettings, AS_IN_REWARDS] = PythonSettings()
    """Of Python graders, as in the section `rewards`."""
    judge: Annotated[JudgeSettings, AS_IN_REWARDS] = JudgeSettings()
    """Of models that grade, as in the section `rewards`."""
    limits: Annotated[FineTuningLimits, BOUND] = FineTuningLimits()

    @field_validator("sampling")
    @classmethod
    def _leaves_calls_to_the_loop(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in OF_LOOPS if name in sampling]:
            raise ValueError(f"{', '.join(taken)} cannot be set here: the service sets it")
        return sampling

    @property
    def gateway_key(self) -> str | None:
        """What authorises calls to the gateway; None without keys."""
        return next(iter(self.admin_keys), None)
