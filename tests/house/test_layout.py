"""The house rules that no linter checks: imports, docstrings, lengths and names in each package."""

import ast
import queue
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.packages import PACKAGES, ROOT, sources

EXTRAS = {
    "environments": ["cli"],
    "gateway": ["gateway"],
    "rollout_server": ["rollout"],
    "trainer_service": ["trainer", "wandb"],
    "reward_service": ["rewards"],
    "fine_tuning": ["fine-tuning", "rewards"],
    "rollout_queue": ["object-store", "otel"],
    "weir": ["cli"],
}
"""The groups of optional dependencies that a package may import, besides those of every service."""
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 500, 60
TORCH_FAMILY = {"torch", "deepspeed", "transformers"}
OF_THE_ENGINE = {"weir.demo.smollm2"}
"""Programs that run in the engine's environment."""


@dataclass
class Module:
    """What the rules ask about a file."""

    lines: int
    docstring: str | None
    imports: set[str] = field(default_factory=set)
    """The top-level packages that it imports anywhere, inside functions as well."""
    functions: list[tuple[str, int]] = field(default_factory=list)
    """Their names and lines."""
    classes: list[str] = field(default_factory=list)


@cache
def read(path: Path) -> Module:
    """Parse and walk a file, once for all rules."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    module = Module(len(text.splitlines()), ast.get_docstring(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module.imports |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module.imports.add(node.module.split(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
        elif isinstance(node, ast.ClassDef):
            module.classes.append(node.name)
    return module


def test_the_folder_queue_shadows_nothing() -> None:
    assert not (ROOT / "queue" / "__init__.py").exists()
    assert queue.__file__ is not None
    assert Path(queue.__file__).parent == Path(sysconfig.get_path("stdlib"))


def test_the_standard_queue_is_found_from_the_repository_root() -> None:
    asked = "import queue, asyncio; asyncio.run(asyncio.to_thread(queue.Queue)); print(queue.__file__)"
    command = [sys.executable, "-c", asked]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found).parent == Path(sysconfig.get_path("stdlib"))


def test_modules_that_load_quickly_import_no_heavy_library() -> None:
    """One process imports all of them: a library that is loaded then was loaded by one of them."""
    modules = "gateway.settings, gateway.app, weir.configuration, weir.__main__"
    asked = f"import sys, {modules}; print(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", asked]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert {"gateway", "weir"} <= loaded
    assert not loaded & {*TORCH_FAMILY, "matplotlib", "pyarrow"}


def test_the_client_library_imports_httpx_alone() -> None:
    asked = (
        "import sys, httpx; before = set(sys.modules); import weir.client; print(*{*sys.modules} - before)"
    )
    command = [sys.executable, "-c", asked]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    foreign = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert "weir.client.agent_sessions" in loaded
    assert foreign == {"environments", "rollout_queue", "weir"}
    assert {name for name in loaded if name.startswith(("environments.", "rollout_queue."))} == {
        "environments.errors",
        "environments.intervals",
        "environments.programs",
        "environments.programs.patience",
        "environments.task_ids",
        "rollout_queue.clock",
    }
    assert not [name for name in loaded if name.startswith("weir.stack")]


def test_the_names_of_the_client_library_cost_the_command_line_nothing() -> None:
    asked = "import sys, weir; before = set(sys.modules); weir.session; print(*{*sys.modules} - before)"
    loaded = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert {"weir.client", "httpx"} <= set(loaded.split()), "they are loaded when they are used"


@pytest.mark.parametrize("package", PACKAGES)
def test_only_the_trainer_and_shims_import_torch(package: str) -> None:
    guests = {
        name: found
        for name, path in sources(package)
        if (found := TORCH_FAMILY & read(path).imports)
        and package != "trainer_service"
        and "shim" not in name.split(".")
        and name not in OF_THE_ENGINE
    }
    assert not guests


def named(pins: Iterable[str]) -> set[str]:
    """The names of the pinned distributions, in lower case and with `-` for `_`."""
    return {re.split(r"[=<>\[]", pin)[0].lower().replace("_", "-") for pin in pins}


@pytest.fixture(scope="module")
def brought() -> Mapping[str, list[str]]:
    """The distributions that bring each importable package."""
    return packages_distributions()


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_is_declared_for_it(package: str, brought: Mapping[str, list[str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ["service", *EXTRAS.get(package, [])]
    declared = named(pin for extra in extras for pin in project["optional-dependencies"][extra])
    undeclared = {
        (name, module)
        for name, path in sources(package)
        for module in read(path).imports
        if name not in OF_THE_ENGINE
        and module in brought
        and module not in PACKAGES
        and not named(brought[module]) & declared
    }
    assert not undeclared


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_for(package: str) -> None:
    assert not [name for name, path in sources(package) if not read(path).docstring]


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_functions_are_short(package: str) -> None:
    long = []
    for name, path in sources(package):
        module = read(path)
        if module.lines > MOST_LINES:
            long.append(name)
        long += [f"{name}.{each}" for each, lines in module.functions if lines > MOST_LINES_OF_A_FUNCTION]
    assert not long


def test_no_two_classes_have_the_same_name() -> None:
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for name, path in sources(package):
            for each in read(path).classes:
                found.setdefault(each, []).append(name)
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


def test_the_wheel_is_made_of_the_packages() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    places = {name: "weir" if name == "weir" else f"weir/_services/{name}" for name in PACKAGES}
    expected = {str(path.relative_to(ROOT)): places[name] for name, path in PACKAGES.items()}
    assert wheel["sources"] == expected
    assert sorted(wheel["include"]) == sorted(f"/{path}" for path in expected)
    assert all((path / "__init__.py").is_file() for path in PACKAGES.values())


def test_the_command_line_contains_the_configuration_of_redis() -> None:
    linked = PACKAGES["weir"] / "stack" / "redis.conf"
    assert linked.resolve() == ROOT / "queue" / "redis.conf"
