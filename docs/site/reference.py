"""Writes the generated pages of the site, from the code: settings, REST, command line and Python API.

python docs/site/reference.py DIRECTORY
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from fastapi import FastAPI

from gateway.app import ROUTES
from gateway.rest.openapi import openapi_document
from rollout_queue.http.api_page import REFUSED
from weir.__main__ import app as command_line
from weir.configuration import every_section

SERVICES = {
    "gateway": "What agents meet",
    "rollout_server": "One for each engine",
    "trainer": "Learns from what agents did",
    "rewards": "The reward service",
    "fine_tuning": "The service for fine-tuning jobs",
    "stack": "What `weir up` starts",
}
PYTHON_API = {
    "weir.client": "What an agent's program imports. It needs httpx alone.",
    "environments.environment": "What an environment of your own is made of.",
}
"""The modules that users' code meets, and what each is for."""


def settings_page() -> Iterator[str]:
    """Every setting with its default, as `weir config --explain` prints it."""
    yield "# Settings\n"
    yield "Each field is also a variable: `gateway.port` is `WEIR_GATEWAY__PORT`. `weir config` prints"
    yield "the values of a machine, `weir config --explain` this table. What several have stands once.\n"
    for section in every_section():
        yield f"## {section.name}\n\n{SERVICES[section.name]}.\n\n| setting | default | |\n|---|---|---|"
        for each in section.leaves():
            name = each.path.removeprefix(f"{section.name}.")
            unit = f" {each.unit}" if each.unit else ""
            yield f"| `{name}` | `{_cell(each.default)}`{unit} | {_cell(each.sentence)} |"
        yield ""


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


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


def python_page() -> Iterator[str]:
    """What users' own code imports; mkdocstrings puts the docstrings in."""
    yield "# Python\n"
    for module, what in PYTHON_API.items():
        yield f"{what}\n\n::: {module}\n"


PAGES = {"settings": settings_page, "rest": rest_page, "cli": cli_page, "python": python_page}


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (directory / f"{name}.md").write_text("\n".join(page()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
