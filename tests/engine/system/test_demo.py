"""`weir demo`, as a newcomer runs it: the policy learns, the summary says so, and no process is left."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.serving import free_port
from tests.support.system.real_system import PORTS
from tests.support.tolerances import ulps

pytestmark = pytest.mark.long


def test_the_demo_learns_and_cleans_up(tmp_path: Path) -> None:
    ports = {name: str(free_port()) for name in PORTS}
    command = [sys.executable, "-m", "weir", "demo", "--seed", "0", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | ports, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["reward_start"] < 0.35
    assert summary["reward_end"] >= 0.9
    assert len(summary["versions_served"]) >= 10
    assert sum(summary["sessions_by_verdict"].values()) == summary["episodes"]
    assert summary["sessions_by_verdict"]["trained"] > 0
    # The log-probabilities are at least -ln 512, and each comes from float32 sums of at most 256 products.
    assert summary["abs_logp"][0] <= ulps(256, of=math.log(512))
    assert (tmp_path / "reward.png").stat().st_size > 10_000
    commands = [str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]


def test_a_model_that_others_have_trained_learns_to_write_json(tmp_path: Path) -> None:
    ports = {name: str(free_port()) for name in PORTS}
    command = [sys.executable, "-m", "weir", "demo", "--model", "smollm2", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | ports, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = done.stdout.splitlines()
    assert sum(line.startswith("asked:  ") for line in told) == 3
    before, after = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("before", "after")
    )
    assert before["reward"]["high"] < after["reward"]["low"]
    assert len(before["tasks"]) == len(after["tasks"]) == 64
    assert {task["task_id"] for task in before["tasks"]} == {task["task_id"] for task in after["tasks"]}
    assert set(before["versions"]) == {"0"}
