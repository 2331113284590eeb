"""Services of this tree in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> dict[str, str]:
    """In which Python finds this tree's packages from any directory."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "queue", ROOT / "deploy"]))
    return os.environ | {"PYTHONPATH": path, **variables}


def started(
    directory: Path, words: Sequence[str], sections: dict[str, Any], **variables: str
) -> "subprocess.Popen[bytes]":
    """`python -m <words> --config weir.yaml` in this directory, with these sections in the file."""
    file = directory / "weir.yaml"
    file.write_text(yaml.safe_dump(sections))
    command = [sys.executable, "-m", *words, "--config", str(file)]
    return subprocess.Popen(command, cwd=directory, env=environment(**variables))


def live(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/live", timeout=120).status_code == 200
    return False
