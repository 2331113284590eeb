"""Mistakes before anything is installed are answered by `make`, or by the README."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.mistakes import mistakes_at

ROOT = Path(__file__).parents[3]
NEEDED = ("build.txt", "services.txt", "torch-cpu.txt", "engine-cpu.txt")


@pytest.mark.parametrize("given", mistakes_at("make"))
def test_make_says_what_to_do(given: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (locks := tmp_path / "deploy" / "requirements").mkdir(parents=True)
    for name in NEEDED:
        (locks / name).touch()
    other = tmp_path / "python3"
    other.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    other.chmod(0o755)
    command = ["make", *given["make"].split(), "TORCH=cpu"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode != 0
    assert re.search(given["answer"], told.stderr), told.stderr


@pytest.mark.parametrize("given", mistakes_at("readme"))
def test_the_readme_says_what_to_do(given: dict[str, Any]) -> None:
    assert re.search(given["answer"], (ROOT / "README.md").read_text(encoding="utf-8"))
