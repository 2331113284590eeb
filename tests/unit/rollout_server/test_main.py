"""A configuration that cannot work is refused in one sentence, before anything is started."""

import socket
import sys
from pathlib import Path

import pytest

from rollout_server.__main__ import main
from tests.support.rollout_server.weights import write_model


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rollout_server"])
    monkeypatch.setattr("rollout_queue.starting.begin_log", lambda *_: None)  # pytest has the log


def refusal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    """The sentence that Python prints before it exits with status 1."""
    free = {"WEIR_ROLLOUT_SERVER__PORT": "0", "WEIR_ROLLOUT_SERVER__ENGINE_PORT": "0"}
    for name, value in (free | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, str)
    return end.value.code


def test_a_server_without_a_model_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert refusal(monkeypatch) == (
        "rollout_server.model_path has no default: set it in weir.yaml, or set WEIR_MODEL_PATH"
    )
    said = refusal(monkeypatch, WEIR_MODEL_PATH=str(tmp_path))
    assert said.startswith("rollout_server.model_path is not a model that can be served")
    assert "\n" not in said


@pytest.mark.parametrize("field", ["port", "engine_port"])
def test_a_port_in_use_is_refused(tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        chosen = {f"WEIR_ROLLOUT_SERVER__{field.upper()}": port, "WEIR_MODEL_PATH": str(model)}
        said = refusal(monkeypatch, **chosen)
    assert said.startswith(f"port {port} on 127.0.0.1 is in use")
    assert f"rollout_server.{field}" in said


def test_another_address_without_keys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    said = refusal(monkeypatch, WEIR_MODEL_PATH=str(model), WEIR_ROLLOUT_SERVER__HOST="0.0.0.0")
    assert "refusing to listen on 0.0.0.0 without keys" in said
