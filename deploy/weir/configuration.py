"""`weir config`: the complete effective configuration of every service, with defaults, without secrets."""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import ValidationError

from rollout_queue.settings import ServiceSettings, file_document
from weir.stack.settings import StackSettings

SECRET_FIELDS = frozenset(
    {"client_keys", "admin_keys", "api_key", "rollout_server_key", "trainer_key", "engine_key", "headers"}
)
CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
"""The part of a URL that may hold Redis' password."""
SECRET_OPTION = re.compile(r"(?<=[?&])\w*password=[^&\s]*&?")
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
    """The configuration as YAML that is valid as a weir.yaml. It begins with the names of what it lacks."""
    whole = {kind.section: _section(kind) for kind in service_settings()}
    unknown = set(file_document()) - set(whole)
    notes = [f"no service reads the section {name!r}" for name in sorted(unknown)]
    if secrets := list(_secrets(whole, "")):
        notes.append(f"left out, because secret: {', '.join(secrets)}")
    text = yaml.safe_dump(_without_secrets(whole), sort_keys=False, allow_unicode=True)
    return "".join(f"# {note}\n" for note in notes) + text


def _section(kind: type[ServiceSettings]) -> dict[str, Any]:
    try:
        return kind().model_dump(mode="json")
    except ValidationError as error:
        # If a field is missing, pydantic also reports each field whose default depends on it. Only the
        # missing field is a fault.
        faults = [each["loc"] for each in error.errors() if each["type"] != "default_factory_not_called"]
        if faults != [("model_path",)]:
            raise
        placeholder: dict[str, Any] = {"model_path": "unset"}
        return kind(**placeholder).model_dump(mode="json") | {"model_path": None}


def _is_secret(name: Any, value: Any) -> bool:
    return name in SECRET_FIELDS and bool(value)


def _secrets(value: Any, place: str) -> Iterator[str]:
    """The places of all secrets in the value, such as `gateway.admin_keys`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        below = f"{place}.{name}".lstrip(".")
        if _is_secret(name, each) or (isinstance(each, str) and _without_password(each) != each):
            yield below
        else:
            yield from _secrets(each, below)


def _without_secrets(value: Any) -> Any:
    """The value without keys and passwords, at any depth."""
    if isinstance(value, dict):
        return {name: _without_secrets(each) for name, each in value.items() if not _is_secret(name, each)}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return _without_password(value) if isinstance(value, str) else value


def _without_password(text: str) -> str:
    found = SECRET_OPTION.sub("", CREDENTIALS.sub("", text))
    return found if found == text else found.rstrip("?&")
