"""Groups of the gateway's settings: for engines' calls, images, Tinker, the page, wrong keys."""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout_queue.settings import CommaSeparated


class ImageSettings(BaseModel):
    """Images in the requests of agents, for models that read them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: CommaSeparated = []
    """Hosts, with their port if it is not the scheme's, from which images are fetched that a request names by
    an http or https address. From no other host, and from none inside a private network."""
    max_images: int = Field(32, ge=1)
    """Images of one conversation."""
    max_bytes: int = Field(20 * 2**20, ge=1)
    """Bytes of one image, as the client sends it."""
    max_pixels: int = Field(2**25, ge=1)
    """Pixels of one image, before it is resized. One is decoded in about 10 bytes a pixel; two at once."""
    fetch_timeout_s: float = Field(10.0, gt=0)
    cache_bytes: int = Field(64 * 2**20, ge=0)
    """Memory for decoded images, which agents send again with every call."""


class TinkerSettings(BaseModel):
    """The interface of the Tinker SDK (`/api/v1`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_model: str | None = None
    """The name by which clients know the base model, and load its tokenizer: a name on the Hugging Face hub,
    or a directory on their machine. Null: `model_path`."""
    max_log_bytes: int = Field(256 * 2**20, ge=2**20)
    """What the commands and the unread results of all models may take in Redis, at most an eighth of its
    `maxmemory`. The model whose command is the oldest may take as much again."""
    session_timeout_s: float = Field(1800.0, gt=0)
    """The models of a client without a sign of life for so long are freed; checkpoints stay. The SDK sends
    one every 10 s while its process lives."""
    session_retention_s: float = Field(7 * 86400.0, gt=0)
    """How long the records of a client session stay after its models have ended: what it sampled from, and
    which commands it sent. A model with named weights stays."""
    max_samples: int = Field(2000, ge=1)
    """How many sequences one gateway process samples at once; half of them for one client key."""
    sample_patience_s: float = Field(600.0, ge=0)
    """How long a sample is tried again while no engine can make it."""
    poll_s: float = Field(25.0, gt=0, le=40)
    """How long a poll waits for its result. The SDK gives up after 45 s."""


class PageSettings(BaseModel):
    """The operators' page, `GET /`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    """Without the page, its paths are a 404, and no cookie opens anything."""
    idle_s: float = Field(8 * 3600.0, ge=60)
    """Whoever signed in has to sign in again after so long without a request of the page."""
    longest_s: float = Field(24 * 3600.0, ge=60)
    """The same, whether or not there were requests."""
    sessions_per_key: int = Field(20, ge=1, le=1000)
    """How many browsers may be signed in with one secret; one more signs the oldest out."""
    every_s: float = Field(2.0, ge=0.1)
    """How often the page gets a new picture of the deployment, while somebody looks at it."""
    viewers: int = Field(64, ge=1, le=4096)
    """How many browsers one gateway process sends pictures to. A further one gets a 429."""


class WrongKeySettings(BaseModel):
    """How many requests with a wrong key each gateway process answers with a 401. A further one gets a 429,
    and gets it late. A request with a valid key is never refused for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_address: int = Field(60, ge=1)
    """For one address of a client, at once and then in a minute. All clients behind one proxy have the
    proxy's address."""
    in_all: int = Field(600, ge=1)
    """For all addresses together."""
    delay_s: float = Field(1.0, ge=0, le=30)
    """How late the 429 comes. A connection carries one request at a time, so this slows whoever guesses."""


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
