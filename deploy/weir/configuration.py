"""`weir config`: the effective configuration of every service, with defaults, without secrets.

settings of a section ─ without hidden fields, and without what an earlier section has said ─▶ PrintedField, …
    ├─▶ YAML with a comment on each field, which is valid as a weir.yaml
    └─▶ --explain: name, default, unit, and what the field changes

A hidden field is printed if it has another value than its default. The configuration is read before `weir up`
starts anything, too, so that a fault in any section is told first.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollout_queue.config_file import refuse_unknown_sections
from rollout_queue.settings import SHORT_NAMES, Hidden, ServiceSettings, check_names, models_in, read_settings
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


@dataclass(frozen=True)
class PrintedField:
    """A field as it is printed: a value, or a group of fields."""

    path: str
    value: Any
    """Without secrets; None for a group."""
    fields: tuple["PrintedField", ...]
    default: Any
    unit: str
    sentence: str
    """What the field changes."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def leaves(self) -> Iterator["PrintedField"]:
        """The fields that have a value, in this group and below."""
        if not self.fields:
            yield self
        for each in self.fields:
            yield from each.leaves()


def effective_configuration() -> str:
    """The configuration as YAML that is valid as a weir.yaml. It begins with the names of what it lacks.
    Raises MalformedSettings."""
    left_out = list[str]()
    lines = [line for section in _sections(left_out) for line in _yaml_of(section, "")]
    note = [f"# left out, because secret: {', '.join(left_out)}"] if left_out else []
    return "\n".join([*note, *lines, ""])


def explained_configuration() -> str:
    """Each field that `weir config` prints: its name, default and unit, and what it changes. Raises
    MalformedSettings."""
    return "\n".join(
        f"{each.path}  (default: {each.default}{f', {each.unit}' if each.unit else ''})\n    {each.sentence}"
        for section in _sections([])
        for each in section.leaves()
    )


def every_section() -> list[PrintedField]:
    """All fields, the hidden ones too, a group for each service. Raises MalformedSettings."""
    return list(_sections([], hidden_too=True))


MOST_OF_A_COMMENT = 100


def _yaml_of(shown: PrintedField, indent: str) -> Iterator[str]:
    """The lines of a field, the first with the beginning of its sentence as a comment."""
    if shown.fields:
        yield f"{indent}{shown.name}:"
        for each in shown.fields:
            yield from _yaml_of(each, f"{indent}  ")
        return
    written = yaml.safe_dump({shown.name: shown.value}, sort_keys=False, allow_unicode=True, width=10_000)
    first, *rest = written.splitlines()
    comment = re.split(r"(?<=[.;]) ", shown.sentence)[0].rstrip(".;")
    yield f"{indent}{first}  # {shorten(comment, MOST_OF_A_COMMENT, placeholder=' …')}"
    yield from (f"{indent}{line}" for line in rest)


def _sections(left_out: list[str], hidden_too: bool = False) -> Iterator[PrintedField]:
    said = set[str]()
    for kind in service_settings():
        settings, values = _section(kind)
        public = _public(values, kind.section, left_out)
        fields = tuple(_fields(settings, public, f"{kind.section}.", said, hidden_too))
        yield PrintedField(kind.section, None, fields, None, "", "")
        said |= SHORT_NAMES & kind.model_fields.keys()


def _fields(
    settings: BaseModel, values: Mapping[str, Any], place: str, said: set[str], hidden_too: bool
) -> Iterator[PrintedField]:
    """The fields of a section or group that are printed. `said` are the names that an earlier section has
    printed; WEIR_{NAME} sets such a field for all of them."""
    kind = type(settings)
    for name, info in kind.model_fields.items():
        given = getattr(settings, name)
        default = info.get_default(call_default_factory=True, validated_data=settings.__dict__)
        hidden = not hidden_too and any(isinstance(each, Hidden) for each in info.metadata)
        if name not in values or ((hidden or name in said) and given == default):
            continue
        sentence = sentence_of_field(kind, name, info)
        if name in SHORT_NAMES and name not in said:
            sentence += f" For all services: WEIR_{name.upper()}."
        inner: tuple[PrintedField, ...] = ()
        if isinstance(given, BaseModel):
            inner = tuple(_fields(given, values[name], f"{place}{name}.", set(), hidden_too))
            if not inner:
                continue
        yield PrintedField(
            f"{place}{name}",
            values[name],
            inner,
            "none" if info.is_required() else _plain(default),
            unit_of(name, info),
            sentence,
        )


def _plain(default: Any) -> Any:
    """A default as YAML writes it, if it is a single value."""
    if isinstance(default, bool | None):
        return {None: "null", True: "true", False: "false"}[default]
    return default


UNITS = {
    "_s": "seconds",
    "_minutes": "minutes",
    "_bytes": "bytes",
    "_pixels": "pixels",
    "_versions": "versions",
    "_steps": "steps",
    "_per_minute": "a minute",
    "_share": "share of 1",
    "_port": "port",
    "_tokens": "tokens",
    "_rows": "rows",
    "_groups": "groups",
}
"""The units that the ends of names say."""


def unit_of(name: str, info: FieldInfo) -> str:
    """The unit of a field; empty if it has none."""
    found = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    return "" if info.annotation in (bool, str) else found


COMMON = {
    "host": "The address on which the service listens.",
    "port": "The port on which the service listens.",
    "model_name": "The name under which clients call the policy.",
    "gateway_url": "Where the gateway is.",
    "trainer_url": "Where the trainer is.",
    "admin_keys": "The keys of operators and of services.",
    "client_keys": "The keys of clients.",
    "rollout_server_key": "The key of rollout servers.",
    "trainer_key": "The key of the trainer.",
    "engine_key": "The key that engines ask for.",
    "policies_dir": "The directory of published versions.",
    "checkpoint_dir": "The directory of checkpoints.",
    "name": "Which formula it is, with the fields beside it.",
    "clip_low": "How far below 1 the ratio may be before it is clipped.",
    "clip_high": "How far above 1 the ratio may be before it is clipped.",
    "low": "The lower bound.",
    "high": "The upper bound.",
    "anchor": "The policy that the ratio compares with: prox, that before the step; rollout, the engine's.",
    "cap": "The largest weight.",
    "estimator": "The estimator of the KL divergence.",
    "coefficient": "The factor of the term.",
    "overlong": "How answers near the longest length lose reward; null: not at all.",
    "max_rows": "The most rows of one step.",
    "mode": "Over what the losses of tokens are averaged.",
    "least": "The least number of calls that a server may have.",
    "fetch_timeout_s": "How long the host of an image may take.",
    "reward_groups": "How many groups make a mean of `reward_drop`.",
    "row_bytes": "Largest row of a file.",
    "gateway_port": "The gateway's `port`.",
    "rollout_port": "The rollout server's `port`.",
    "rollout_id": "The rollout server's `id`.",
    "engine_port": "The engine's port.",
    "trainer_port": "The trainer's `port`.",
    "rewards_port": "The reward service's `port`.",
}
"""What fields mean that several sections have, where a section says nothing else of them."""


def sentence_of_field(kind: type[BaseModel], name: str, info: FieldInfo) -> str:
    """What the field changes: the text below it, else that of its group, else a common one."""
    for each in kind.__mro__:
        if issubclass(each, BaseModel) and (text := _texts_in(each).get(name)):
            return text
    groups = [each.__doc__ for each in models_in(info.annotation) if each.__doc__]
    return " ".join((groups[0] if groups else COMMON.get(name, "")).split())


@cache
def _texts_in(kind: type[BaseModel]) -> Mapping[str, str]:
    """The text below each field of a class."""
    file = inspect.getsourcefile(kind)
    if kind in (BaseModel, ServiceSettings.__base__) or file is None:
        return {}
    found = dict[str, str]()
    for node in ast.walk(_tree_of(file)):
        if not isinstance(node, ast.ClassDef) or node.name != kind.__name__:
            continue
        for statement, below in zip(node.body, node.body[1:], strict=False):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


@cache
def _tree_of(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _section(kind: type[ServiceSettings], **given: Any) -> tuple[ServiceSettings, dict[str, Any]]:
    """The settings of a section, and all their values. Its model may be missing, because `weir up` can make
    one. Raises MalformedSettings."""
    info = kind.model_fields.get("model_path")
    missing = info is not None and info.is_required() and not given.get("model_path")
    if missing and service_field(kind.section, "model_path") is None:
        settings = read_settings(kind, **given, model_path="unset")
        return settings, settings.model_dump(mode="json") | {"model_path": None}
    settings = read_settings(kind, **given)
    return settings, settings.model_dump(mode="json")


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
