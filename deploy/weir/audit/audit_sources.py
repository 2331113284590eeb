"""Where the evidence of a run is read from: its Redis, its trainer and the trainer's checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_redis
from rollout_queue.redis.settings import RedisSettings, without_password
from weir.options import redis_of, settings_of_run, trainer_directory
from weir.stack import stack_state
from weir.stack.services import effective_sections
from weir.stack.settings import StackSettings, redis_access


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


def sources_of_run(
    config: Path | None,
    run_dir: Path | None,
    redis_url: str | None,
    trainer_url: str | None = None,
    checkpoint_dir: Path | None = None,
) -> Sources:
    """The sources of the run that the options of a command name. Says which, and raises StackError, as
    `settings_of_run` does."""
    settings = settings_of_run(config, run_dir, None, redis_url)
    return sources_of(settings, redis_url, trainer_url, checkpoint_dir)


def sources_of(
    settings: StackSettings,
    redis_url: str | None = None,
    trainer_url: str | None = None,
    checkpoint_dir: Path | None = None,
) -> Sources:
    """Each source comes from the arguments, or else as `weir.options` says. No setting of a service has the
    trainer's address. Instead, the trainer reports it in Redis."""
    found = stack_state.read(settings.run_dir)
    running = {} if found is None else found.urls
    redis = redis_url or redis_of(settings, running)
    access = redis_access(redis)
    trainer = trainer_url or running.get("trainer_service") or reported_trainer(access)
    of_run = Path(effective_sections(settings)["trainer"]["checkpoint_dir"]) if running else None
    return Sources(
        redis_url=redis,
        trainer_url=trainer or f"http://127.0.0.1:{settings.trainer_port}",
        admin_key=next(iter(settings.admin_keys), None),
        checkpoint_dir=trainer_directory(settings, "checkpoint_dir", checkpoint_dir or of_run),
        access=access,
    )


def reported_trainer(access: RedisSettings) -> str | None:
    """The address that the trainer has reported in Redis; None without one, or if Redis does not answer."""
    try:
        with open_redis(access, timeout_s=5, protocol=2) as redis:
            fields: Any = redis.hgetall(key_names.TRAINER)
            return TrainerReport.of(fields).url
    except (RedisError, ValueError):
        return None
