"""The settings of a connection to Redis, which every service that uses Redis has in its section."""

from pathlib import Path

from pydantic import BaseModel, Field, field_validator

from rollout_queue.redis.client.address import read_address
from rollout_queue.redis.client.replication import Replication

PREFIX_PATTERN = r"^[A-Za-z0-9_.\-]{1,64}$"


class RedisSettings(BaseModel, hide_input_in_errors=True):  # the URL may have a password
    """Where Redis is, who this service is to it, and whom it trusts."""

    redis_url: str = "redis://127.0.0.1:6379/0"
    """redis:// or rediss:// (TLS); redis+sentinel://h1:p1,h2:p2/mymaster/0; redis+cluster://h1:p1,h2:p2."""
    redis_password_file: Path | None = None
    """A file with the password, read whenever a connection is opened. It counts before one in the URL."""
    redis_sentinel_password_file: Path | None = None
    """The password of the sentinels; they have none if this is null."""
    redis_ca_file: Path | None = None
    """The authorities (PEM) that may have signed the certificates of rediss://; null: those of the system."""
    redis_certificate_file: Path | None = None
    """The certificate (PEM) by which this service identifies itself."""
    redis_key_file: Path | None = None
    """The key (PEM) of `redis_certificate_file`."""
    redis_check_hostname: bool = True
    """Whether the certificate must name the host or address to which the service connects."""
    redis_key_prefix: str = Field("weir", pattern=PREFIX_PATTERN)
    """What the names of all keys begin with. Deployments that share a Redis have different prefixes."""

    @field_validator("redis_url")
    @classmethod
    def _readable(cls, value: str) -> str:
        read_address(value)
        return value


class WriterRedisSettings(RedisSettings):
    """The same for a service that records what others were told."""

    redis_wait_replicas: int = Field(0, ge=0, le=8)
    """How many replicas of Redis must have a record before anybody is told that it is stored: a turn, a
    reward, an API key, a version and its number, the plan of what is served."""
    redis_wait_timeout_s: float = Field(1.0, gt=0, le=5)
    """How long the replicas may take. Then the client gets an error, and a turn is retracted."""

    @property
    def replication(self) -> Replication:
        return Replication(self.redis_wait_replicas, self.redis_wait_timeout_s)
