"""Where traces are sent, and how many."""

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator


class OtelSettings(BaseModel):
    """Section `otel` of a service. With `{}`, the standard variables `OTEL_EXPORTER_OTLP_…` say where to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = None
    """The collector's address for OTLP over HTTP: http://host:4318, or a whole URL with its path. Null: what
    OTEL_EXPORTER_OTLP_ENDPOINT says."""
    sample_ratio: float = Field(0.01, ge=0, le=1)
    """The share of the agents' calls that begin a trace. A call with a `traceparent` and a known key
    follows that instead, and the trainer's steps are always traced. OTEL_TRACES_SAMPLER counts first."""
    headers: dict[str, str] = {}
    """Headers for the collector, such as a key."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """How long one export may take."""
    queue_spans: int = Field(2048, ge=1, le=2**17)
    """Spans that wait for their export. More are dropped, and counted."""
    export_every_s: float = Field(2.0, gt=0)

    @field_validator("endpoint")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                raise ValueError("give an http:// or https:// address without credentials")
        return value

    @property
    def traces_url(self) -> str | None:
        """Where spans are posted to; None leaves it to the standard variables."""
        if self.endpoint is None:
            return None
        path = urlsplit(self.endpoint).path.rstrip("/")
        return self.endpoint if path else self.endpoint.rstrip("/") + "/v1/traces"
