"""The settings of `weir up` and `weir demo`: section `stack` of weir.yaml.

A field that a service owns is set in the service's section (`gateway.port`, WEIR_GATEWAY__PORT); the stack
reads it there as well, so that both use one setting.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import quote

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from rollout_queue.config_file import MalformedSettings, file_document
from rollout_queue.redis.settings import RedisSettings, without_password
from rollout_queue.settings import (
    FOR_TESTS,
    SECRETS,
    SHORT_NAMES,
    CommaSeparated,
    Hidden,
    ServiceKey,
    ServiceSettings,
    secret,
    why,
)
from weir.installing import engine_python

OWNERS = {
    "gateway_port": ("gateway", "port"),
    "rollout_port": ("rollout_server", "port"),
    "rollout_id": ("rollout_server", "id"),
    "engine_port": ("rollout_server", "engine_port"),
    "trainer_port": ("trainer", "port"),
    "rewards_port": ("rewards", "port"),
    "engine_python": ("rollout_server", "engine_python"),
    "model_path": ("gateway", "model_path"),
}
"""For a field of the stack: the section and the field of the service that owns it."""


OF_SERVICE = Hidden("the service's own section has it, and is where it is set")


class StackSettings(ServiceSettings):
    """Section `stack` of weir.yaml."""

    section: ClassVar[str] = "stack"
    owners: ClassVar[Mapping[str, str]] = {field: ".".join(owner) for field, owner in OWNERS.items()}

    run_dir: Path = Path("run")
    """What a run writes: logs, Redis' file, policies, checkpoints, weir.yaml, stack.json."""
    model_path: Path | None = None
    """Hugging Face directory that the engine and the trainer start from."""
    models_dir: Path = Path("run/models")
    """The directory where the demo's models are cached."""
    redis_port: int = 6379
    """The port of Redis."""
    gateway_port: Annotated[int, OF_SERVICE] = 8000
    rollout_port: Annotated[int, OF_SERVICE] = 8100
    rollout_id: Annotated[str, OF_SERVICE] = "rollout-0"
    engine_port: Annotated[int, OF_SERVICE] = 30000
    trainer_port: Annotated[int, OF_SERVICE] = 8200
    rewards_port: Annotated[int, OF_SERVICE] = 8300
    engine_python: Path = Field(default_factory=engine_python)
    """The interpreter of SGLang's own environment, which has other versions of packages than Weir."""
    trainer_ranks: int = Field(1, ge=1)
    """How many processes train together, each on its share of a batch, and on its own GPU if there is one."""
    client_keys: CommaSeparated = []
    admin_keys: CommaSeparated = []
    rollout_server_key: ServiceKey = None
    trainer_key: ServiceKey = None
    engine_key: ServiceKey = None
    redis_password: str | None = None
    """The password that Redis asks for. `weir up` makes it, and all keys above that nobody has set."""
    services: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Fields of the services' sections, by section; they win over weir.yaml and the environment."""
    start_timeout_s: Annotated[float, FOR_TESTS] = 600.0
    """How long the services may take to become ready. The engine takes most of this time."""
    stop_timeout_s: Annotated[float, FOR_TESTS] = 60.0
    """How long each service may take to stop before it is killed; longer than any service's own limit."""
    free_disk_bytes: int = 2 * 2**30
    """The free space that the disk of the run directory must have before anything starts."""
    free_memory_bytes: int | None = Field(None, ge=0)
    """The free memory that this machine must have before anything starts; 0: any. Null: what the model is
    estimated to need on CPU."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *args: Any, **kwargs: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = super().settings_customise_sources(settings_cls, *args, **kwargs)
        return (*sources, _FieldsOfServices(settings_cls))

    @property
    def redis_url(self) -> str:
        user_info = "" if self.redis_password is None else f":{quote(self.redis_password, safe='')}@"
        return f"redis://{user_info}127.0.0.1:{self.redis_port}/0"

    @property
    def logs_dir(self) -> Path:
        return self.run_dir / "logs"


class _FieldsOfServices(PydanticBaseSettingsSource):
    """Reads the fields in OWNERS from where their service reads them: the environment, then its section."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        section, name = OWNERS[field_name]
        value = os.environ.get(variable(section, name)) or file_document().get(section, {}).get(name)
        return value, field_name, False

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(self.settings_cls.model_fields[name], name)[0] for name in OWNERS}
        return {name: value for name, value in found.items() if value is not None}


def variable(section: str, name: str) -> str:
    """The environment variable of one field of one service."""
    return f"WEIR_{section}__{name}".upper()


def service_field(section: str, name: str) -> str | None:
    """A field of a service as the service reads it: from the environment, a file of a secret, and weir.yaml.
    None if unset. Raises MalformedSettings."""
    named = f"WEIR_{name}".upper()
    short = secret(named) if name in SECRETS else os.environ.get(named) if name in SHORT_NAMES else None
    found = os.environ.get(variable(section, name)) or short or file_document().get(section, {}).get(name)
    return str(found) if found else None


def redis_access(url: str) -> RedisSettings:
    """How the trainer of this configuration reaches the Redis at `url`. Raises MalformedSettings."""
    found = {name: service_field("trainer", name) for name in RedisSettings.model_fields}
    given = {name: value for name, value in found.items() if value is not None}
    try:
        return RedisSettings.model_validate(given | {"redis_url": url})
    except ValidationError as error:
        raise MalformedSettings(f"{without_password(url)} is no address of Redis: {why(error)}") from error


PYTHON = sys.executable
"""The interpreter that runs the services: the one that runs the command line."""
