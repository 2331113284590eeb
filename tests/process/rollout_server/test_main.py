"""A configuration that cannot work ends the process with one sentence."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "queue")])
    environment = os.environ | {"PYTHONPATH": paths, "WEIR_MODEL_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "rollout_server"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    (sentence,) = ended.stderr.splitlines()
    assert "model_path is not a model that can be served" in sentence
