"""In an empty environment: `pip install` of the wheel, and `weir demo`, which makes its environments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import ROOT
from tests.support.serving import free_port
from tests.support.system.real_system import PORTS

pytestmark = pytest.mark.long


def run(*command: str | Path, **variables: str) -> None:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        [*map(str, command)], env=own, cwd=variables["HOME"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_an_installed_wheel_runs_the_demo_without_an_index(tmp_path: Path) -> None:
    """Everything is loaded into a directory first, so that both commands need no index."""
    release, home, loaded, weir = (tmp_path / name for name in ("files", "home", "loaded", "env/bin/weir"))
    home.mkdir()
    where = {"HOME": str(home), "WEIR_INSTALL_DIR": str(tmp_path / "own"), "WEIR_TORCH": "cpu"}
    run(sys.executable, ROOT / "deploy" / "release.py", "--untagged", "--no-chart", "--out", release, **where)
    run(sys.executable, "-m", "venv", tmp_path / "env", **where)
    (wheel,) = release.glob("*.whl")
    run(weir.with_name("pip"), "install", "--no-deps", wheel, **where)
    run(weir, "install", "--download", loaded, **where)
    run(weir.with_name("pip"), "install", "--no-index", "--find-links", loaded, wheel, **where)
    ports = {name: str(free_port()) for name in PORTS}
    run(weir, "demo", **where, **ports, WEIR_WHEELS=str(loaded))
    assert json.loads((home / "run" / "demo" / "summary.json").read_text())["criterion"]["met"]
