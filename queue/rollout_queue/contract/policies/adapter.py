"""A LoRA adapter that is a policy of its own: calls name it as `policy:name@version`."""

import msgspec


class PublishedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as the gateways store it. A name and a version name one content for ever."""

    name: str
    version: int
    location: str
    manifest_sha256: str | None = None
    created_at: float
    passing: bool = False
    """It makes room for others, and comes back when it is called."""

    @property
    def field(self) -> str:
        """Its field in Redis."""
        return f"{self.name}@{self.version}"
