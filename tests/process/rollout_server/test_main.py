"""A configuration that cannot work is refused in one sentence, before anything is started."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rollout_server.weights import write_model

ROOT = Path(__file__).parents[3]


def start(directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "queue")]), **variables}
    command = [sys.executable, "-m", "rollout_server"]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_server_without_a_model_says_so(tmp_path: Path) -> None:
    ended = start(tmp_path)
    assert (ended.returncode, ended.stderr) == (1, "rollout_server.model_path: Field required\n")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    ended = start(tmp_path, WEIR_MODEL_PATH=str(tmp_path))
    assert ended.returncode == 1
    assert "model_path is not a model that can be served" in ended.stderr


@pytest.mark.parametrize("field", ["port", "engine_port"])
def test_a_port_in_use_is_refused(tmp_path: Path, field: str) -> None:
    model = write_model(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        free = {"WEIR_ROLLOUT_SERVER__PORT": "0", "WEIR_ROLLOUT_SERVER__ENGINE_PORT": "0"}
        chosen = free | {f"WEIR_ROLLOUT_SERVER__{field.upper()}": port, "WEIR_MODEL_PATH": str(model)}
        ended = start(tmp_path, **chosen)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"port {port} on 127.0.0.1 is in use")
    assert f"rollout_server.{field}" in ended.stderr


def test_another_address_without_keys_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    ended = start(tmp_path, WEIR_MODEL_PATH=str(model), WEIR_ROLLOUT_SERVER__HOST="0.0.0.0")
    assert ended.returncode == 1
    assert "refusing to listen on 0.0.0.0 without keys" in ended.stderr
