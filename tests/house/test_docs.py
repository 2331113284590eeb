"""The documents agree with the code: map, glossary, settings, variables, reasons of dependencies."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from docs.site.reference import libraries_page
from gateway.settings import GatewaySettings
from rollout_queue.redis.settings import WriterRedisSettings
from rollout_queue.settings import SECRETS, SHORT_NAMES, ServiceSettings
from rollout_server.settings import RolloutServerSettings
from tests.support.packages import PACKAGES, sources
from trainer_service.settings import TrainerSettings
from weir.stack.settings import StackSettings

SECTIONS: dict[str, type[ServiceSettings]] = {
    kind.section: kind for kind in (GatewaySettings, RolloutServerSettings, TrainerSettings, StackSettings)
}
ROOT = Path(__file__).parents[2]
ROOMS = (
    "gateway",
    "rollout_server",
    "trainer_service",
    "reward_service",
    "environments",
    "fine_tuning",
    "queue/rollout_queue",
    "deploy/weir",
)


def test_the_map_names_every_file_with_its_first_sentence() -> None:
    printed = subprocess.run(
        [sys.executable, "docs/map.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.name != "__init__.py"]
    shown = [line.split(maxsplit=1) for line in printed.stdout.splitlines() if ".py " in line]
    assert sorted(name for name, _ in shown) == sorted(path.name for path in modules)
    assert all(sentence for _, sentence in shown)


def test_the_architecture_is_one_page_of_at_most_10_kb() -> None:
    assert len((ROOT / "docs/architecture.md").read_bytes()) <= 10 * 1024


def test_the_glossary_has_at_most_40_terms_and_the_code_uses_each() -> None:
    glossary = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Glossary")[1]
    rows = re.findall(r"^- ([a-z, -]+): \S", glossary, re.M)
    terms = [term for row in rows for term in row.split(", ")]
    assert 20 < len(terms) <= 40
    code = "\n".join(
        path.read_text(encoding="utf-8") for room in ROOMS for path in (ROOT / room).rglob("*.py")
    )
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", code)}
    assert not [term for term in terms if not set(re.split("[ -]", term)) <= words]


def test_the_architecture_names_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = [path for room in ROOMS for path in (ROOT / room).iterdir() if (path / "__init__.py").exists()]
    assert not [path for path in folders if f"`{path.name}/" not in page]


def test_every_documented_variable_is_read() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "queue/README.md"]
    named = {
        name for page in pages for name in re.findall(r"\bWEIR_[A-Z0-9_]*[A-Z0-9]", page.read_text("utf-8"))
    }
    rows = re.findall(r"`(redis_\w+)`", (ROOT / "docs/redis.md").read_text("utf-8"))
    named |= {f"WEIR_{name.upper()}" for name in rows if name in WriterRedisSettings.model_fields}
    named -= {"WEIR_KEY"}  # of an agent, in an example
    assert len(named) > 40
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split() if not name.endswith((".md", ".json"))]
    literal = {
        name.decode()
        for path in files
        if path.is_file()
        for name in re.findall(rb"\bWEIR_[A-Z0-9_]*[A-Z0-9]", path.read_bytes())
    }
    short = {f"WEIR_{name.upper()}" for name in SHORT_NAMES}
    short |= {f"WEIR_{name.upper()}_FILE" for name in SECRETS}
    unread = {name for name in named if "__" not in name} - short - literal
    assert not unread
    assert not [name for name in named if "__" in name and not _is_field(name)]


def _is_field(variable: str) -> bool:
    """Whether a variable such as WEIR_GATEWAY__LIMITS__TOKENS names a setting."""
    section, *path = variable.removeprefix("WEIR_").lower().split("__")
    fields: dict[str, FieldInfo] = SECTIONS[section].model_fields
    for name in path:
        if name not in fields:
            return False
        fields = getattr(fields[name].annotation, "model_fields", {})
    return True


def test_every_dependency_is_pinned_and_has_a_reason_beside_the_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [pin for group in project["optional-dependencies"].values() for pin in group]
    pins = [pin for pin in pins if not pin.startswith("weir")]
    assert all("==" in pin for pin in pins)
    rows = [
        row.strip("| ").split(" | ") for row in libraries_page() if re.match(r"\| [^l-]|\| l\S+ \| \d", row)
    ]
    assert sorted(f"{name}=={version.rstrip(' |')}" for name, version, *_ in rows) == sorted(pins)
    assert not [row[0] for row in rows if len(row) != 3 and not row[0].startswith("types-")]


def test_the_five_lines_of_the_readme_are_the_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = (ROOT / "examples/five_lines.py").read_text(encoding="utf-8")
    code = example.split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in readme


NAMED_FILE = re.compile(r"`([\w./]+\.py)`")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_that_the_code_names_exists(package: str) -> None:
    """In a docstring or a comment: by its name, or by the end of its path."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    known = {f"/{path}" for path in listed.stdout.split()}
    missing = [
        (name, named)
        for name, path in sources(package)
        for named in NAMED_FILE.findall(path.read_text(encoding="utf-8"))
        if not any(each.endswith(f"/{named}") for each in known)
    ]
    assert not missing
