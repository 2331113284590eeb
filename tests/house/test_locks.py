"""The lock files hold the pins of pyproject.toml and the hash of each file, and name no package index."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy" / "requirements"
EVERY_LOCK = [*sorted(LOCKS.glob("*.txt")), *sorted(ROOT.glob("[bt]*/**/requirements.txt"))]
EXTRAS = {
    "all": ["gateway", "rollout", "trainer", "rewards", "object-store", "otel", "cli"],
    "services": ["gateway", "rollout", "trainer", "rewards", "object-store", "otel", "cli", "dev"],
    "gateway": ["gateway", "otel"],
    "rewards": ["rewards"],
    "fine_tuning": ["fine-tuning", "rewards"],
    "rollout_server": ["rollout", "object-store", "otel"],
    "trainer": ["trainer", "object-store", "otel", "gateway", "cli"],
}

SERVICES = {
    "gateway": "gateway",
    "rewards": "reward_service",
    "fine_tuning": "fine_tuning",
    "rollout_server": "rollout_server",
    "trainer": "trainer_service",
}
"""What is run in the image that is made of a lock."""
IMPORTED_WITH = """
import importlib, sys
from importlib.metadata import packages_distributions

class Missing:
    brought = packages_distributions()
    def find_spec(self, name, path=None, target=None):
        distributions = self.brought.get(name.partition(".")[0], ())
        distributions = {each.lower().replace("_", "-") for each in distributions}
        if distributions and not distributions & {"weir-rl", "torch", *sys.argv[2:]}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
importlib.import_module(sys.argv[1] + ".__main__")
"""


def normal(name: str) -> str:
    """The normalised name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(path: Path) -> dict[str, str]:
    """The version of each package in a lock file."""
    found = re.findall(r"^([\w.-]+)==(\S+) \\$", path.read_text(encoding="utf-8"), re.M)
    return {normal(name): version for name, version in found}


def pinned(extras: list[str]) -> dict[str, str]:
    """The version of each package that pyproject.toml pins for these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [pin for extra in ["service", *extras] for pin in project["optional-dependencies"][extra]]
    versions = (pin.partition("==") for pin in pins if not pin.startswith("weir-rl["))
    return {normal(name): version for name, _, version in versions}


@pytest.mark.parametrize("path", EVERY_LOCK, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_package_of_a_lock_has_its_hashes_and_no_address(path: Path) -> None:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    assert any(re.match(r"[\w.-]+==", line) for line in lines)
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        assert re.fullmatch(r"([\w.-]+==[\w.+!-]+|--hash=sha256:[0-9a-f]{64})( \\)?", line), line
        assert line.startswith("--hash=") or following.startswith("--hash="), line


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_holds_what_pyproject_pins(name: str) -> None:
    versions = locked(LOCKS / f"{name}.txt")
    wanted = pinned(EXTRAS[name])
    if torch := wanted.pop("torch", None):
        assert locked(LOCKS / "torch-cpu.txt") == {"torch": f"{torch}+cpu"}
        assert locked(LOCKS / "torch-cuda.txt")["torch"] == torch
    assert {name: versions.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("name", [*EXTRAS, "torch-cuda"])
def test_an_image_or_an_installation_has_the_versions_that_the_tests_ran_with(name: str) -> None:
    tested = locked(LOCKS / "services.txt")
    shared = locked(LOCKS / f"{name}.txt")
    assert {package: tested[package] for package in shared.keys() & tested.keys()} == {
        package: shared[package] for package in shared.keys() & tested.keys()
    }


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_has_what_its_service_imports(name: str) -> None:
    words = [sys.executable, "-c", IMPORTED_WITH, SERVICES[name], *locked(LOCKS / f"{name}.txt")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


def test_the_engine_is_the_same_with_and_without_a_gpu() -> None:
    assert locked(LOCKS / "engine-cpu.txt")["sglang"] == locked(LOCKS / "engine-cuda.txt")["sglang"]
