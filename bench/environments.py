"""What one runner of environments costs with 10 and with 1,000 episodes at once: CPU a step, memory an
episode, in the runner and in the episodes' processes.

python -m bench.environments [--episodes N] [--concurrency N …]

runner (with one host) ──▶ gateway ──▶ engine (bench.engine), which paces its answers so that episodes overlap
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from bench.gateway import running_rig
from bench.processes import module
from bench.toy_environment import STEPS
from tests.support.tiny_model import make_tiny_model

PACE_MS = 100.0
"""Between two events of an answer. An episode of eight answers then takes some seconds."""
GROUP = 8
EVERY_S = 2.0


def measured(port: int, folder: Path, concurrency: int, episodes: int) -> dict[str, float]:
    """One run: CPU of the runner, its host and the episodes' processes, the peak memory of the runner and of
    the others, and the episodes that did not complete."""
    command = module("weir", "env", "run", "python:bench.toy_environment:Toy", "--episodes", episodes)
    command += ["--concurrency", str(concurrency), "--group-size", str(GROUP), "--run-dir", str(folder)]
    command += ["--gateway", f"http://127.0.0.1:{port}", "-s", "max_tokens=8", "--set", "step_s=120"]
    environment = os.environ | {"WEIR_CLIENT_KEYS": "bench-client"}
    peak_mib = others_mib = began = 0.0
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as runner:
        done = 0
        while not done:
            time.sleep(0.1)
            done, status, used = os.wait4(runner.pid, os.WNOHANG)
            plays = not done and not (folder / "summary.json").exists()  # then it draws, which needs more
            peak_mib = max(peak_mib, resident_mib(runner.pid) if plays else 0.0)
            if plays and time.monotonic() > began + EVERY_S:  # it costs more than the others do
                began, others_mib = time.monotonic(), max(others_mib, started_mib(runner.pid))
        runner.returncode = os.waitstatus_to_exitcode(status)
    if runner.returncode:
        raise SystemExit(f"the runner ended with {runner.returncode}")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "concurrency": concurrency,
        "steps": summary["turns"],
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": peak_mib,
        "others_mib": others_mib,
        "not_completed": summary["episodes"] - summary["by_status"].get("completed", 0),
    }


def resident_mib(pid: int) -> float:
    """The resident memory of a process now. (What wait4 tells includes the time before exec.)"""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def started_mib(pid: int) -> float:
    """What the processes that it has started need now; memory that they share counts once."""
    found = 0
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            found += each.memory_full_info().pss
    return found / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.environments", description=__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[10, 1000])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        with running_rig(model, folder, PACE_MS) as rig:
            port = rig.gateways[0][0]
            start = measured(port, folder / "start", 8, GROUP)
            rows = [
                measured(port, folder / f"at-{each}", each, min(given.episodes, 16 * each))
                for each in given.concurrency
            ]
    print(f"{'at once':>8} {'steps':>8} {'CPU ms a step':>14}", end="")
    print(f" {'peak MiB':>9} {'others MiB':>11} {'not completed':>14}")
    for row in rows:
        per_step = 1000 * (row["cpu_s"] - start["cpu_s"]) / (row["steps"] - start["steps"])
        print(
            f"{row['concurrency']:8} {row['steps']:8} {per_step:14.2f} {row['peak_mib']:9.0f} "
            f"{row['others_mib']:11.0f} {row['not_completed']:14}"
        )
    more = rows[-1]["concurrency"] - rows[0]["concurrency"]
    if more:
        print(f"memory an episode: {1024 * (rows[-1]['peak_mib'] - rows[0]['peak_mib']) / more:.0f} KiB")
    print(f"steps an episode: {STEPS}")


if __name__ == "__main__":
    main()
