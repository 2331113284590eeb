"""Where the evidence of a run is read from: its Redis, its trainer and the trainer's checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from rollout_queue.protocol.trainer import TrainerReport
from rollout_queue.redis import keys
from weir.stack import state
from weir.stack.services import effective_sections
from weir.stack.settings import StackSettings, service_field


class Sources(NamedTuple):
    """The addresses and the key that an audit needs."""

    redis_url: str
    trainer_url: str | None
    admin_key: str | None = None
    checkpoint_dir: Path | None = None
    """Read if the trainer does not answer."""

    @property
    def redis_address(self) -> str:
        """The URL of Redis without a password, for messages."""
        scheme, _, rest = self.redis_url.rpartition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"


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
    found = state.read(settings.run_dir)
    running = {} if found is None else {name: service.url for name, service in found.services.items()}
    redis = redis_url or running.get("redis") or service_field("trainer", "redis_url") or settings.redis_url
    trainer = trainer_url or running.get("trainer_service") or reported_trainer(redis)
    directory = None if running else service_field("trainer", "checkpoint_dir")
    return Sources(
        redis_url=redis,
        trainer_url=trainer or f"http://127.0.0.1:{settings.trainer_port}",
        admin_key=next(iter(settings.admin_keys), None),
        checkpoint_dir=checkpoint_dir
        or Path(directory or effective_sections(settings)["trainer"]["checkpoint_dir"]),
    )


def reported_trainer(redis_url: str) -> str | None:
    """The address that the trainer has reported in Redis; None without one, or if Redis does not answer."""
    try:
        with Redis.from_url(redis_url, socket_timeout=5, socket_connect_timeout=5, protocol=2) as redis:
            fields: Any = redis.hgetall(keys.TRAINER)
            return TrainerReport.of(fields).url
    except (RedisError, ValueError):
        return None
