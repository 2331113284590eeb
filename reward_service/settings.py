"""The section `rewards` of the configuration, with every default."""

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from reward_service.dispatch.reward_rules import AnyRule, DispatchSettings
from reward_service.judging import JudgeSettings
from reward_service.python_sandbox import PythonSettings
from rollout_queue.http.callers import bearer
from rollout_queue.settings import BOUND, CommaSeparated, HttpSettings, ServiceUrl, SettingsPart


class GradingLimits(SettingsPart):
    """Bounds on requests that bring a grader."""

    body_bytes: int = Field(4 * 2**20, ge=1024)
    """A larger body is a 413."""
    runs: int = Field(8, ge=1)
    """Requests that are graded at once."""
    waiting: int = Field(64, ge=0)
    """Requests that wait for that; a further one is a 429."""
    run_timeout_s: float = Field(300.0, gt=0)
    """How long one request may be graded."""


class RewardSettings(HttpSettings):
    """The reward service."""

    section: ClassVar[str] = "rewards"

    port: int = 8300
    client_keys: CommaSeparated = []
    admin_keys: CommaSeparated = []
    """The first admin key, else the first client key, is the one for the gateway. With a client key the
    service sees that client's sessions only."""
    gateway_url: ServiceUrl = "http://127.0.0.1:8000"
    limits: Annotated[GradingLimits, BOUND] = GradingLimits()
    python: PythonSettings = PythonSettings()
    judge: JudgeSettings = JudgeSettings()
    rules: list[AnyRule] = []
    """Who rewards which sessions; the first rule that matches does."""
    dispatch: Annotated[DispatchSettings, BOUND] = DispatchSettings()

    @field_validator("rules")
    @classmethod
    def _own_names(cls, rules: list[AnyRule]) -> list[AnyRule]:
        names = [rule.name for rule in rules]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two rules have the name {twice[0]!r}")
        return rules

    @property
    def gateway_headers(self) -> dict[str, str]:
        """What authorises a call to the gateway; empty without keys."""
        key = next(iter([*self.admin_keys, *self.client_keys]), None)
        return bearer(key)
