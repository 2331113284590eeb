"""`weir config`: the complete effective configuration of every service, with defaults, without secrets.

The same is read before `weir up` starts anything, so that a fault in any section is told first.
"""

import re
from typing import Any

import yaml

from rollout_queue.config_file import refuse_unknown_sections
from rollout_queue.settings import ServiceSettings, check_names, read_settings
from weir.stack.services import determined_sections
from weir.stack.settings import StackSettings, service_field

SECRET_FIELDS = frozenset(
    {
        *("client_keys", "admin_keys", "rollout_server_key", "trainer_key", "engine_key"),
        *("api_key", "redis_password", "headers"),
    }
)
CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
"""The part of a URL that may hold Redis' password."""
SECRET_OPTION = re.compile(r"(?<=[?&])\w*password=[^&\s]*&?")
"""An option of a URL that holds one."""
SECRET_WORD = re.compile(r"--[\w-]*(?:key|password|token)(=.*)?", re.DOTALL)
"""An option of an engine's command line that holds one."""


def service_settings() -> list[type[ServiceSettings]]:
    """The settings of every service. Imported here, because most commands do not need them."""
    from fine_tuning.settings import FineTuningSettings
    from gateway.settings import GatewaySettings
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


def check_configuration(settings: StackSettings) -> list[str]:
    """Sentences about variables that nobody reads. Raises MalformedSettings for the first fault in any
    section, with what the stack gives each service."""
    kinds = service_settings()
    unread = check_names(*kinds)
    given = determined_sections(settings)
    refuse_unknown_sections("stack.services", settings.services)
    for kind in kinds:
        fields = given.get(kind.section, {})
        _section(kind, **{name: value for name, value in fields.items() if value is not None})
    return unread


def effective_configuration() -> str:
    """The configuration as YAML that is valid as a weir.yaml. It begins with the names of what it lacks.
    Raises MalformedSettings."""
    left_out = list[str]()
    document = {kind.section: _public(_section(kind), kind.section, left_out) for kind in service_settings()}
    note = f"# left out, because secret: {', '.join(left_out)}\n" if left_out else ""
    return note + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _section(kind: type[ServiceSettings], **given: Any) -> dict[str, Any]:
    """All fields of a section. Its model may be missing, because `weir up` can make one. Raises
    MalformedSettings."""
    field = kind.model_fields.get("model_path")
    missing = field is not None and field.is_required() and not given.get("model_path")
    if missing and service_field(kind.section, "model_path") is None:
        placeholder = {**given, "model_path": "unset"}
        return read_settings(kind, **placeholder).model_dump(mode="json") | {"model_path": None}
    return read_settings(kind, **given).model_dump(mode="json")


def _public(value: Any, place: str, left_out: list[str]) -> Any:
    """The value without keys and passwords, at any depth. Their places are added to `left_out`."""
    if isinstance(value, dict):
        lacks = [name for name, each in value.items() if name in SECRET_FIELDS and each]
        left_out += [f"{place}.{name}" for name in lacks]
        kept = {name: each for name, each in value.items() if name not in lacks}
        return {name: _public(each, f"{place}.{name}", left_out) for name, each in kept.items()}
    if isinstance(value, list):
        secret = [at for at in range(len(value)) if _of_secret_option(value, at)]
        left_out += [f"{place}.{at}" for at in secret]
        return [_public(each, f"{place}.{at}", left_out) for at, each in enumerate(value) if at not in secret]
    if isinstance(value, str) and (shown := _without_password(value)) != value:
        left_out.append(place)
        return shown
    return value


def _of_secret_option(words: list[Any], at: int) -> bool:
    """Whether this word of a command line is an option with a secret, or its value."""
    own, former = (SECRET_WORD.fullmatch(str(words[each])) if each >= 0 else None for each in (at, at - 1))
    return bool(own or (former and former[1] is None))


def _without_password(text: str) -> str:
    found = SECRET_OPTION.sub("", CREDENTIALS.sub("", text))
    return found if found == text else found.rstrip("?&")
