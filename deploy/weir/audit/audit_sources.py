"""Where the evidence of a run is read from: its Redis, its trainer and the trainer's checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_redis
from rollout_queue.redis.settings import RedisSettings, without_password
from weir.stack import stack_state
from weir.stack.services import effective_sections
from weir.stack.settings import StackSettings, redis_access, service_field


class Sources(NamedTuple):
    """The addresses and the key that an audit needs."""

    redis_url: str
    trainer_url: str | None
    admin_key: str | None = None
    checkpoint_dir: Path | None = None
    """Read if the trainer does not answer."""
    access: RedisSettings = RedisSettings()
    """How Redis is reached: all settings of a connection beside the URL."""

    @property
    def redis(self) -> RedisSettings:
        return self.access.model_copy(update={"redis_url": self.redis_url})

    @property
    def redis_address(self) -> str:
        """The URL of Redis without a password, for messages."""
        return without_password(self.redis_url)


def sources_of(
    settings: StackSettings,
    redis_url: str | None = None,
    trainer_url: str | None = None,
    checkpoint_dir: Path | None = None,
) -> Sources:
    """Each source comes from the first of these that names it: the arguments; the services that run in the
    run directory; the services' own settings (as in a container); the settings that `weir up` would use.

    No setting of a service has the trainer's address. Instead, the trainer reports it in Redis.
    """
    found = stack_state.read(settings.run_dir)
    running = {} if found is None else {name: service.url for name, service in found.services.items()}
    redis = redis_url or redis_of(settings)
    access = redis_access(redis)
    trainer = trainer_url or running.get("trainer_service") or reported_trainer(access)
    directory = None if running else service_field("trainer", "checkpoint_dir")
    return Sources(
        redis_url=redis,
        trainer_url=trainer or f"http://127.0.0.1:{settings.trainer_port}",
        admin_key=next(iter(settings.admin_keys), None),
        checkpoint_dir=checkpoint_dir
        or Path(directory or effective_sections(settings)["trainer"]["checkpoint_dir"]),
        access=access,
    )


def redis_of(settings: StackSettings) -> str:
    """The Redis of the services that run in the run directory; else that of the services' own settings; else
    the one that `weir up` would start."""
    found = stack_state.read(settings.run_dir)
    running = found.services.get("redis") if found is not None else None
    url = running.url if running is not None else service_field("trainer", "redis_url")
    return url or settings.redis_url


def reported_trainer(access: RedisSettings) -> str | None:
    """The address that the trainer has reported in Redis; None without one, or if Redis does not answer."""
    try:
        with open_redis(access, timeout_s=5, protocol=2) as redis:
            fields: Any = redis.hgetall(key_names.TRAINER)
            return TrainerReport.of(fields).url
    except (RedisError, ValueError):
        return None
