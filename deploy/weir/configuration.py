"""`weir config`: the complete effective configuration of every service, defaults included, keys masked."""

import re
from typing import Any

import yaml
from pydantic import ValidationError

from rollout_queue.settings import ServiceSettings, file_document
from weir.stack.settings import StackSettings

MASKED_FIELDS = frozenset(
    {"client_keys", "admin_keys", "api_key", "rollout_server_key", "trainer_key", "engine_key", "headers"}
)
CREDENTIALS = re.compile(r"://[^/@\s]*@")
"""The part of a URL that may hold Redis' password."""
SECRET_OPTIONS = re.compile(r"([?&]\w*password=)[^&\s]*")
"""An option of a URL that holds one."""


def service_settings() -> list[type[ServiceSettings]]:
    """The settings of every service. Imported here, because most commands do not need them."""
    from fine_tuning.settings import FineTuningSettings
    from gateway.settings.service import GatewaySettings
    from reward_service.settings import RewardSettings
    from rollout_server.settings import RolloutServerSettings
    from trainer_service.settings import TrainerSettings

    return [
        GatewaySettings,
        RolloutServerSettings,
        TrainerSettings,
        RewardSettings,
        FineTuningSettings,
        StackSettings,
    ]


def effective_configuration() -> str:
    """The configuration as YAML that is valid as a weir.yaml."""
    document = {kind.section: _section(kind) for kind in service_settings()}
    unknown = set(file_document()) - set(document)
    notes = "".join(f"# no service reads the section {name!r}\n" for name in sorted(unknown))
    return notes + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _section(kind: type[ServiceSettings]) -> dict[str, Any]:
    try:
        values = kind().model_dump(mode="json")
    except ValidationError as error:
        # If a field is missing, pydantic also reports each field whose default depends on it. Only the
        # missing field is a fault.
        faults = [each["loc"] for each in error.errors() if each["type"] != "default_factory_not_called"]
        if faults != [("model_path",)]:
            raise
        placeholder: dict[str, Any] = {"model_path": "unset"}
        values = kind(**placeholder).model_dump(mode="json") | {"model_path": None}
    return _without_secrets(values)


def _without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """The values with keys and passwords masked, at any depth."""
    return {name: _shown(name, value) for name, value in values.items()}


def _shown(name: str, value: Any) -> Any:
    if name in MASKED_FIELDS:
        return _masked(value)
    if isinstance(value, dict):
        return _without_secrets(value)
    if isinstance(value, list):
        return [_shown("", each) for each in value]
    return _without_password(value)


def _masked(keys: dict[str, Any] | list[str] | str | None) -> dict[str, str] | list[str] | str | None:
    if isinstance(keys, dict):
        return dict.fromkeys(keys, "***")
    return ["***" for _ in keys] if isinstance(keys, list) else "***" if keys else None


def _without_password(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return SECRET_OPTIONS.sub(r"\1***", CREDENTIALS.sub("://***@", value))
