"""Where the evidence of a run is read from: its Redis, its trainer and the trainer's checkpoints."""

from pathlib import Path
from typing import NamedTuple

from weir.stack import state
from weir.stack.services import effective_sections
from weir.stack.settings import StackSettings


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
    """The sources that the arguments name; else those of the services that run in the run directory; else
    those that `weir up` would start there."""
    found = state.read(settings.run_dir)
    running = {} if found is None else {name: service.url for name, service in found.services.items()}
    trainer = effective_sections(settings)["trainer"]
    return Sources(
        redis_url=redis_url or running.get("redis") or trainer["redis_url"],
        trainer_url=trainer_url or running.get("trainer_service") or f"http://127.0.0.1:{trainer['port']}",
        admin_key=next(iter(settings.admin_keys), None),
        checkpoint_dir=checkpoint_dir or Path(trainer["checkpoint_dir"]),
    )
