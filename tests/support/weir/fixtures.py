"""Tiny services that listen, say whether they are ready, and write down how they ended."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.serving import free_port
from tests.support.waiting import PATIENCE_S
from weir.stack.service_process import Service, http_ready
from weir.stack.settings import StackSettings

SCRIPT = Path(__file__).with_name("fake_service.py")


FakeService = Callable[..., Service]


@pytest.fixture
def unused_ports() -> list[int]:
    return [free_port(), free_port()]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where each fake writes its name when it is asked to end."""
    return tmp_path / "notes"


@pytest.fixture
def fake_service(notes: Path) -> FakeService:
    """Builds a fake service: it is unready until the file `gate` exists, and writes its child's pid to
    `child`."""

    def build(name: str, *, gate: Path | str = "-", child: Path | str = "-", port: int = 0) -> Service:
        port = port or free_port()
        url = f"http://127.0.0.1:{port}"
        command = (sys.executable, str(SCRIPT), name, str(port), str(notes), str(gate), str(child))
        ports = {port: f"{name}.port"}
        return Service(name, command, ports, url, http_ready(url), dict(os.environ))

    return build


@pytest.fixture
def settings(tmp_path: Path) -> StackSettings:
    return StackSettings(run_dir=tmp_path / "run", start_timeout_s=PATIENCE_S, stop_timeout_s=PATIENCE_S)
