"""The settings of the gateway that say how many calls an engine gets."""

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ConcurrencySettings(BaseModel):
    """How many calls a rollout server may have at once, from all gateways. Further calls wait in the gateway,
    for at most `engine_wait_s`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    adaptive: bool = True
    """Have a limit for each server, from what its engine reports. Engines that report no load have none."""
    first: int = Field(64, ge=1)
    """The limit of a server that has just joined."""
    least: int = Field(4, ge=1)
    most: int = Field(4096, ge=1)
    """The bounds of each limit."""
    kv_target: float = Field(0.8, gt=0, le=1)
    """The limit grows until running calls have this share of the engine's key-value cache."""
    kv_high: float = Field(0.9, gt=0, le=1)
    """Above this share the limit shrinks."""
    shrink: float = Field(0.9, gt=0, lt=1)
    """The factor by which it shrinks."""

    @model_validator(mode="after")
    def _ordered(self) -> "ConcurrencySettings":
        if self.least > self.most:
            raise ValueError("least: must not be above most")
        if self.kv_target > self.kv_high:
            raise ValueError("kv_target: must not be above kv_high")
        return self
