"""An upgrade and the way back on the real stack: Redis, checkpoints, the run directory and `weir.yaml` of an
earlier release go on under this one, and then under the earlier one again."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.serving import free_port
from tests.support.system.real_system import PORTS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
BEFORE = "14dce7f0de9c685d4d4a5d6ea10e1ec313d1cbdf"
"""The last commit with the rooms and settings of the earlier release."""
SETTINGS = """
gateway:
  port: {port}
  sampling: {{mode: exact}}
  limits: {{open_sessions: 5000}}
trainer:
  algorithm: {{min_live_rows: 4}}
  checkpoint_every_steps: 2
"""


@dataclass
class Release:
    """The commands of one tree, in a directory of its user."""

    tree: Path
    place: Path
    gateway: str
    variables: dict[str, str]

    def weir(self, *words: str) -> str:
        """What the command says; it ends well."""
        return self._run("-m", "weir", *words)

    def train(self) -> int:
        """The agent of the examples plays until a version has learned. Returns the version that is served."""
        program = (self.tree / "examples" / "tool_agent.py").read_text(encoding="utf-8")
        (self.place / "agent.py").write_text(program.replace("http://127.0.0.1:8000", self.gateway), "utf-8")
        assert "answers calls now" in self._run("agent.py")
        return self.served()

    def _run(self, *words: str) -> str:
        paths = os.pathsep.join(str(self.tree / part) for part in ("", "queue", "deploy"))
        variables = os.environ | self.variables | {"PYTHONPATH": paths}
        command = [sys.executable, "-P", *words]
        done = subprocess.run(
            command, cwd=self.place, env=variables, capture_output=True, text=True, timeout=900
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{self.tree}: {' '.join(words)}: {said[-3000:]}"
        assert "Traceback" not in said
        return done.stdout

    def served(self) -> int:
        key = (self.place / "run" / "keys" / "admin_keys").read_text(encoding="utf-8").split()[0]
        reply = httpx.get(f"{self.gateway}/admin/policies/serving", headers={"x-api-key": key}, timeout=120)
        return int(reply.raise_for_status().json()["serving"])


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[tuple[Release, Release]]:
    """The earlier one, and this one."""
    packed = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        pytest.skip(f"this clone does not have the commit {BEFORE}: it is shallow, or no clone")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(tmp_path / "before", filter="data")
    place = tmp_path / "place"
    place.mkdir()
    ports = {name: str(free_port()) for name in PORTS}
    models = {"WEIR_STACK__MODELS_DIR": str(ROOT / "run" / "models")}
    engine = {"WEIR_STACK__ENGINE_PYTHON": str(ROOT / ".venv-engine" / "bin" / "python")}
    port = ports.pop("WEIR_GATEWAY__PORT")
    (place / "weir.yaml").write_text(SETTINGS.format(port=port), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    both = [Release(tree, place, url, ports | models | engine) for tree in (tmp_path / "before", ROOT)]
    yield both[0], both[1]
    if (place / "run" / "stack.json").exists():
        with suppress(AssertionError):
            both[1].weir("down")


def test_a_release_takes_over_and_gives_back(releases: tuple[Release, Release]) -> None:
    before, now = releases
    versions = list[int]()
    for release in (before, now, before):
        release.weir("up")
        if versions:
            assert release.served() >= versions[-1]
        versions.append(release.train())
        assert "every turn was trained once, waits, or has a final verdict" in release.weir("audit")
        release.weir("down")
    assert versions[0] < versions[1] < versions[2]


def test_every_setting_of_the_earlier_release_is_read(releases: tuple[Release, Release]) -> None:
    before, now = releases
    (before.place / "all.yaml").write_text(before.weir("config", "--config", os.devnull), encoding="utf-8")
    now.weir("config", "--config", "all.yaml")
