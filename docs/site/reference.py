"""Writes the generated pages of the site, from the code: settings, metrics, REST, commands and Python API.

python docs/site/reference.py DIRECTORY
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from environments.settings import RunSettings
from fine_tuning.app import registry_of
from gateway.app import ROUTES
from gateway.counters import FleetFigures
from gateway.prometheus import Metrics
from gateway.rest.openapi import openapi_document
from reward_service.app import RewardParts, measure
from reward_service.settings import RewardSettings
from rollout_queue.http.api_page import REFUSED
from rollout_queue.settings import models_in
from rollout_server.rollout_metrics import RolloutMetrics
from trainer_service.app import show_disk
from trainer_service.trainer_metrics import TrainerMetrics
from weir.__main__ import app as command_line
from weir.configuration import every_section, sentence_of_field, service_settings, unit_of

ROOT = Path(__file__).parents[2]
SERVICES = {
    "gateway": "What agents meet",
    "rollout_server": "One for each engine",
    "trainer": "Learns from what agents did",
    "rewards": "The reward service",
    "fine_tuning": "The service for fine-tuning jobs",
    "stack": "What `weir up` starts",
}
HEAD = "| setting | default | |\n|---|---|---|"
PYTHON_API = {
    "weir.client": "What an agent's program imports. It needs httpx alone.",
    "environments.environment": "What an environment of your own is made of.",
}
"""The modules that users' code meets, and what each is for."""


def settings_page() -> Iterator[str]:
    """Every setting with its default, also those of groups that are off by default, and those of a run."""
    yield "# Settings\n"
    yield "Each field is also a variable: `gateway.port` is `WEIR_GATEWAY__PORT`. `weir config` prints the"
    yield "values of a machine, `weir config --explain` the sentences of fields that deployments set. What"
    yield "several have stands once.\n"
    kinds = {kind.section: kind for kind in service_settings()}
    for section in every_section():
        yield f"## {section.name}\n\n{SERVICES[section.name]}.\n\n{HEAD}"
        for each in section.leaves():
            yield _row(each.path.removeprefix(f"{section.name}."), each.default, each.unit, each.sentence)
        kind = kinds[section.name]
        given = {"model_path": "unset"} if "model_path" in kind.model_fields else {}
        yield from _groups_that_are_off(kind.model_validate(given))
    yield f"\n## A run of `weir env`\n\n`--set NAME=VALUE` sets each.\n\n{HEAD}"
    yield from _fields(RunSettings)
    yield from _groups_that_are_off(RunSettings(environment="library:name"))


def _groups_that_are_off(settings: BaseModel, place: str = "") -> Iterator[str]:
    """The fields of the groups that the settings have only if somebody gives them, such as `otel`."""
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _groups_that_are_off(value, f"{place}{name}.")
        elif not value:
            for group in models_in(info.annotation):
                word = _kind_of(group)
                yield f"\n### `{place}{name}`{f', kind `{word}`' if word else ''}\n\n{HEAD}"
                yield from _fields(group)
    yield ""


def _kind_of(group: type[BaseModel]) -> str:
    """The word by which a rule names its kind; empty for other groups."""
    field = group.model_fields.get("kind")
    return field.annotation.__args__[0] if field is not None else ""  # type: ignore[union-attr]


def _fields(kind: type[BaseModel]) -> Iterator[str]:
    for name, info in kind.model_fields.items():
        if name != "kind":
            yield _row(name, _default(info), unit_of(name, info), sentence_of_field(kind, name, info))


def _default(info: FieldInfo) -> object:
    if info.is_required():
        return "none"
    value = info.get_default(call_default_factory=True, validated_data={})
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), value)


def _row(name: str, default: object, unit: str, sentence: str) -> str:
    return f"| `{name}` | `{_cell(default)}`{f' {unit}' if unit else ''} | {_cell(sentence)} |"


def metrics_page() -> Iterator[str]:
    """Every metric that Prometheus reads, but those of a training step, with its labels and its help."""
    yield "# Metrics for Prometheus\n"
    yield "What `GET /metrics` of each service has. [Metrics](../docs/metrics.md) has those of the trainer's"
    yield "steps, which Prometheus gets as well, and says how to read them.\n"
    for service, registry in _registries().items():
        yield f"## {service}\n\n| metric | labels | |\n|---|---|---|"
        for collector in registry._collector_to_names:
            for each in [collector] if isinstance(collector, MetricWrapperBase) else collector.collect():
                yield _metric(each)
        yield ""


def _metric(each: Any) -> str:
    """The row of a metric, or of a family of samples, which call their parts differently."""
    own = isinstance(each, MetricWrapperBase)
    name, kind = (each._name, each._type) if own else (each.name, each.type)
    shown = f"`{name}{'_total' if kind == 'counter' else ''}`"
    labels = ", ".join(f"`{label}`" for label in each._labelnames)
    return f"| {shown} | {labels} | {_cell(each._documentation if own else each.documentation)} |"


def _registries() -> Mapping[str, CollectorRegistry]:
    """What each service registers, with stand-ins for what has the values."""
    nothing: Any = SimpleNamespace(size=0, free=0, waiting=(), memory=None)
    gateway, trainer, rewards = Metrics(), CollectorRegistry(), RewardParts.of(RewardSettings())
    gateway.fleet.read = lambda: FleetFigures({}, 0, 0, 0, 0.0, 0)
    TrainerMetrics(trainer)
    show_disk(nothing, trainer)
    measure(rewards, nothing, nothing)
    return {
        "gateway": gateway.registry,
        "rollout_server": RolloutMetrics(nothing).registry,
        "trainer": trainer,
        "rewards": rewards.metrics.registry,
        "fine_tuning": registry_of(nothing, nothing),
    }


def _cell(value: object) -> str:
    return str(value).replace(f"{ROOT}/", "").replace("|", "\\|").replace("\n", " ")


def rest_page() -> Iterator[str]:
    """The operations of the gateway, by the first part of their path, from its OpenAPI document."""
    app = FastAPI(title="Weir gateway", version="1")
    for routes in ROUTES:
        app.router.routes.extend(routes.router.routes)
    paths: Mapping[str, Any] = openapi_document(app)["paths"]
    yield "# REST of the gateway\n"
    yield "A running gateway has the same at `/docs`, with the schemas of bodies, and at `/openapi.json`. The"
    yield 'key is a bearer token or `x-api-key`. Errors: `{"error": {"message", "type", "param", "code"}}`.\n'
    groups = dict[str, list[str]]()
    for path, operations in paths.items():
        parts = path.strip("/").split("/")
        group = "/".join(parts[:2]) if parts[0] in ("admin", "v1", "api") else parts[0]
        groups.setdefault(f"/{group}", []).extend(_operations(path, operations))
    for group, rows in sorted(groups.items()):
        yield f"## {group}\n\n| | parameters | |\n|---|---|---|"
        yield from rows
        yield ""


def _operations(path: str, operations: Mapping[str, Any]) -> Iterator[str]:
    for method, operation in operations.items():
        names = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
        body = (
            operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        )
        schema = body.get("$ref", "").rpartition("/")[2]
        shown = [f"`?{name}`" for name in names] + ([f"body `{schema}`"] if schema else [])
        text = operation.get("description") or operation.get("summary") or ""
        answers = [
            status
            for status, each in operation["responses"].items()
            if each["description"] != REFUSED and status != "200"
        ]
        said = _cell(text.replace("\n\n", " ")) + (f" Also {', '.join(answers)}." if answers else "")
        yield f"| **{method.upper()}** `{path}` | {' '.join(shown)} | {said} |"


def cli_page() -> Iterator[str]:
    """Every command of `weir` with its arguments and options."""
    yield "# Command line\n\nEach command says the same with `-h`.\n"
    yield from _commands(typer.main.get_command(command_line), "weir")


def _commands(group: Any, name: str) -> Iterator[str]:
    for word, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from _commands(command, f"{name} {word}")
        elif not command.hidden:
            yield f"## {name} {word}\n\n{command.help or ''}\n"
            rows = [_parameter(each) for each in command.params if not getattr(each, "hidden", False)]
            if rows := [row for row in rows if row]:
                yield "| option | default | |\n|---|---|---|"
                yield from rows
                yield ""


def _parameter(each: Any) -> str:
    if each.name == "help":
        return ""
    names = ", ".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts))
    shown = names if each.param_type_name == "option" else f"`{each.name.upper()}`"
    default = each.default if isinstance(each.default, str | int | float | Path) else None
    value = "" if default in (None, False) else f"`{default}`"
    return f"| {shown} | {value} | {_cell(getattr(each, 'help', None) or '')} |"


PIN = re.compile(r'^    "([\w.-]+)==([^"]+)",(?:  # (.+))?$')


def libraries_page() -> Iterator[str]:
    """Every pinned library with its version and its reason, as pyproject.toml has them, by extra."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    yield "# Libraries\n"
    for line in section.splitlines():
        if line.endswith(" = ["):
            yield f"\n## {line.split()[0]}\n\n| library | version | |\n|---|---|---|"
        elif found := PIN.match(line):
            yield f"| {found[1]} | {found[2]} | {_cell(found[3] or '')} |"


def python_page() -> Iterator[str]:
    """What users' own code imports; mkdocstrings puts the docstrings in."""
    yield "# Python\n"
    for module, what in PYTHON_API.items():
        yield f"{what}\n\n::: {module}\n"


PAGES = {
    "settings": settings_page,
    "metrics": metrics_page,
    "rest": rest_page,
    "cli": cli_page,
    "python": python_page,
    "libraries": libraries_page,
}


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (directory / f"{name}.md").write_text("\n".join(page()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
