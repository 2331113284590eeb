"""The settings `rewards.judge`: where models that grade are called."""

from pydantic import BaseModel, ConfigDict, Field, field_validator


class JudgeSettings(BaseModel):
    """How `score_model`, `label_model` and rules of the kind `judge` reach a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str | None = None
    """An API of OpenAI's kind, such as https://api.openai.com/v1; null means Weir's gateway. There each call
    is recorded in a session of its own, which is never trained."""
    api_key: str | None = None
    """The key for `base_url`."""
    timeout_s: float = Field(120.0, gt=0)
    """How long one call may take."""
    ttl_s: float = Field(3600.0, gt=0)
    """The life of a session that a judge's call opens at the gateway."""
    client_models: list[str] = []
    """The models that graders of requests with a client key may ask. An admin's graders may ask any."""
    client_tokens_per_hour: int = Field(1_000_000, ge=0)
    """How many tokens, of prompts and answers together, each client key may spend on these models. A call
    that begins before is finished."""

    @field_validator("base_url")
    @classmethod
    def _without_trailing_slash(cls, value: str | None) -> str | None:
        return value.rstrip("/") or None if value else None
