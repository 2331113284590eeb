"""weir.yaml as it is written, and which names it and the variables WEIR_… may have."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

CONFIG_VARIABLE = "WEIR_CONFIG"
IN_THIS_DIRECTORY = Path("weir.yaml")
SECTIONS = ("gateway", "rollout_server", "trainer", "rewards", "fine_tuning", "stack")
"""One for each service, and one for `weir up`."""
OTHER_VARIABLES = frozenset(
    {
        *(
            "WEIR_REDIS_MEMORY",
            "WEIR_MEMINFO",
            "WEIR_CGROUPS",
            "WEIR_PYTHON",
            "WEIR_RETRY_S",
            "WEIR_MODEL_DIR",
        ),
        *("WEIR_INSTALL_DIR", "WEIR_TORCH", "WEIR_TORCH_INDEX", "WEIR_WHEELS"),
    }
)
"""What the start of Redis, the batch script, the containers and `weir install` read."""
FOREIGN = re.compile(r"WEIR_(TEST_\w+|\w*SERVICE_(HOST|PORT)(_\w+)?|\w+_(TCP|UDP)(_\w+)?)")
"""What tests read, and what Kubernetes sets for a service of this name."""
KUBERNETES_ADDRESS = "tcp://"
Document = dict[str, dict[str, Any]]


class MalformedSettings(ValueError):
    """The configuration cannot be read. The text says where, for the user."""


def config_file() -> Path | None:
    """The file that WEIR_CONFIG names; without the variable, ./weir.yaml if it exists. None if there is none,
    or if the variable is empty."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named is None:
        return IN_THIS_DIRECTORY if IN_THIS_DIRECTORY.is_file() else None
    return Path(named) if named else None


def file_document() -> Document:
    """All sections of weir.yaml, with an empty one in place of null; empty if there is no file. Raises
    MalformedSettings."""
    path = config_file()
    if path is None:
        return {}
    document = _parsed(path, _text_of(path)) or {}
    if not isinstance(document, dict):
        raise MalformedSettings(f"{path} has no sections: write gateway: and the like, with fields below")
    for section, fields in document.items():
        if not isinstance(fields, dict | None):
            raise MalformedSettings(f"{path}: the section {section!r} has no fields: write NAME: VALUE below")
        for name in (section, *(fields or {})):
            if not isinstance(name, str):
                raise MalformedSettings(f"{path}: YAML reads a name as {name!r}: write it in quotes")
    return {section: fields or {} for section, fields in document.items()}


def refuse_unknown_sections(
    where: object, document: Mapping[str, object], known: Collection[str] = SECTIONS
) -> None:
    """Raises MalformedSettings for a section that no service reads. `where` names the document."""
    for section in document:
        if section not in known:
            raise MalformedSettings(
                f"{where}: no service reads the section {section!r}{meant(section, known)}"
            )


def meant(name: str, known: Iterable[str]) -> str:
    """What else a sentence about an unknown name says: the name that was probably meant."""
    names = [*known]
    if close := get_close_matches(name, names, 1):
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(names)}" if len(names) <= len(SECTIONS) else ""


def unknown_variables(fields: Mapping[str, Collection[str]], short_names: Collection[str]) -> list[str]:
    """A sentence for each variable WEIR_… that nobody reads. `fields` are those of the sections that are
    known here. Raises MalformedSettings for one in a section's form that names no section or field."""
    known = {f"WEIR_{name}".upper() for name in short_names} | OTHER_VARIABLES | {CONFIG_VARIABLE}
    written = {f"WEIR_{section}__{field}".upper() for section, names in fields.items() for field in names}
    unread = list[str]()
    for name in sorted(os.environ):
        section, separated, rest = name.upper().removeprefix("WEIR_").lower().partition("__")
        if not name.upper().startswith("WEIR_") or name.upper() in known or FOREIGN.fullmatch(name.upper()):
            continue
        if separated and section not in SECTIONS:
            raise MalformedSettings(f"{name}: there is no section {section!r}{meant(section, SECTIONS)}")
        if separated and section in fields and rest.partition("__")[0] not in fields[section]:
            raise MalformedSettings(f"{name}: there is no such setting{meant(name.upper(), sorted(written))}")
        if not separated and not os.environ[name].startswith(KUBERNETES_ADDRESS):
            unread.append(
                f"{name} is set, and nothing here reads it{meant(name.upper(), sorted(known | written))}"
            )
    return unread


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise _no_text(path) from error
    except OSError as error:
        raise MalformedSettings(f"{path} cannot be read: {error.strerror or error}") from error


def _no_text(path: Path) -> MalformedSettings:
    return MalformedSettings(f"{path} is not text in UTF-8: write it anew with an editor")


def _parsed(path: Path, text: str) -> Any:
    try:
        return yaml.load(text, _OnceNamed)  # noqa: S506 - a SafeLoader
    except yaml.reader.ReaderError:
        raise _no_text(path) from None
    except yaml.YAMLError as error:  # its text would quote the file, and so a secret
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f" at line {mark.line + 1}" if mark else ""
        tabs = ": indent with spaces, not with tabs" if re.search(r"^ *\t", text, re.MULTILINE) else ""
        raise MalformedSettings(f"{path} cannot be read: it is not YAML{where}{tabs}") from None
    except RecursionError:
        raise MalformedSettings(f"{path} cannot be read: it is nested too deeply") from None


class _OnceNamed(yaml.SafeLoader):
    """Refuses a name that stands twice in one place, of which YAML would drop the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise MalformedSettings(
                        f"{config_file()}: {key.value!r} stands twice, again at line "
                        f"{key.start_mark.line + 1}: keep one"
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)
