"""Mistakes at the command line and in the configuration get a sentence, before anything starts."""

import importlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mistakes import DOORS, mistakes_at
from tests.support.serving import free_port
from tests.support.weir.commands import Told, weir

PORTS = ("GATEWAY__PORT", "TRAINER__PORT", "ROLLOUT_SERVER__PORT", "ROLLOUT_SERVER__ENGINE_PORT")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, and an environment in which everything but the mistake is right."""
    for name in [name for name in os.environ if name.startswith("WEIR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WEIR_CONFIG", "")  # a command may set it
    monkeypatch.delenv("WEIR_CONFIG")
    for name in (*PORTS, "STACK__REDIS_PORT"):
        monkeypatch.setenv(f"WEIR_{name}", str(free_port()))
    monkeypatch.setenv("WEIR_ROLLOUT_SERVER__ENGINE_PYTHON", sys.executable)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(path: Path, content: str | dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else bytes.fromhex(content["hex"]))


def started(service: str, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What `python -m SERVICE` says instead of serving."""
    monkeypatch.setattr(sys, "argv", [service])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{service}.__main__").main()
    return Told(1 if isinstance(ended.value.code, str) else 0, "", str(ended.value.code))


@pytest.mark.parametrize("given", mistakes_at("weir", "service"))
def test_the_answer_says_what_to_do(
    given: dict[str, Any], here: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(text: str) -> str:
        return text.replace("{port}", str(taken)).replace("{here}", str(here))

    for name, content in given.get("files", {}).items():
        written(here / name, content)
    for name, value in given.get("variables", {}).items():
        monkeypatch.setenv(name, filled(value))
    service = given.get("service")
    told = started(service, monkeypatch) if service else weir(*shlex.split(filled(given["weir"])))
    assert re.search(filled(given["answer"]), told.both.strip()), told.both
    assert told.status == given.get("status", 1)
    assert "Traceback" not in told.both
    assert "default factory" not in told.both
    assert len(told.err.strip().splitlines()) <= 4, "one sentence, and what the command looked at"


def test_each_of_at_least_60_mistakes_is_made_at_one_door() -> None:
    listed = [each.values[0] for each in mistakes_at(*DOORS)]
    assert len(listed) >= 60
    assert all(len({*DOORS} & each.keys()) == 1 for each in listed)
    assert len({each["mistake"] for each in listed}) == len(listed)
