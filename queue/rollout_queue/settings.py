"""The configuration of every service: a section of `weir.yaml`, environment variables, keyword arguments.

Later wins:  defaults < weir.yaml < WEIR_REDIS_URL and the like < WEIR_GATEWAY__PORT < keyword arguments
"""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

CONFIG_VARIABLE = "WEIR_CONFIG"
SHORT_NAMES = frozenset(
    {
        *("redis_url", "gateway_url", "client_keys", "admin_keys"),
        *("model_path", "model_name", "engines", "router_replay"),
    }
)
"""Fields that deployments set for several services at once, by variables such as WEIR_REDIS_URL."""


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


CommaSeparated = Annotated[list[str], NoDecode, BeforeValidator(_split)]
"""A list that an environment variable may give as `a,b,c`."""


class ObjectStoreSettings(BaseModel):
    """Where the S3-compatible store of policies is. Its keys come from the environment or from the files of
    AWS's own tools, and never from the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint_url: str | None = None
    """http://host:port; null means AWS, or what AWS_ENDPOINT_URL says."""
    region: str | None = None
    """Null means what AWS_DEFAULT_REGION or the profile says."""

    @field_validator("endpoint_url")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                raise ValueError("give an http:// or https:// address without credentials")
        return value


class ServiceSettings(BaseSettings):
    """One section of the configuration. A subclass names its section and its fields."""

    section: ClassVar[str]
    model_config = SettingsConfigDict(extra="forbid", env_nested_delimiter="__", protected_namespaces=())

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (
            init_settings,
            EnvSettingsSource(settings_cls, env_prefix=f"WEIR_{cls.section.upper()}__"),
            _ShortNames(settings_cls, env_prefix="WEIR_"),
            InitSettingsSource(settings_cls, _given(_file_section(cls.section), settings_cls)),
        )


class _ShortNames(EnvSettingsSource):
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        # Other fields have no short name: Kubernetes sets WEIR_PORT itself if a service is named "weir".
        if field_name not in SHORT_NAMES:
            return None, field_name, False
        return super().get_field_value(field, field_name)


def _given(section: dict[str, Any], settings_cls: type[BaseSettings]) -> dict[str, Any]:
    """`section` without required fields that are null. `weir config` prints these for the user to set."""
    required = {name for name, field in settings_cls.model_fields.items() if field.is_required()}
    return {name: value for name, value in section.items() if value is not None or name not in required}


def _file_section(section: str) -> dict[str, Any]:
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return {}
    document = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    return document.get(section) or {}
