"""The cost of the page with a long run in Redis: each route of its data views, the first paint, and memory.

python -m bench.page [--turns N] [--steps N] [--repetitions N] [--model FOLDER]

long_run ──▶ Redis ──▶ gateway ──▶ routes, timed one by one; and a browser
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.long_run import TURNS, fill, group_name, session_name, turn_name
from bench.processes import answering
from tests.support.page.browser import WIDE, chromium, context_of, watched_tab
from tests.support.page.run_metrics import metrics_of
from tests.support.redis_process import RedisProcess
from tests.support.serving import free_port

KEY = "bench-admin-key"
FIRST_PAINTS = 5


@contextmanager
def gateway(model: Path, redis_url: str) -> Iterator[tuple[str, int]]:
    """A gateway in a process of its own: its URL and its process id."""
    port = free_port()
    given = {
        "WEIR_REDIS_URL": redis_url,
        "WEIR_MODEL_PATH": str(model),
        "WEIR_ADMIN_KEYS": KEY,
        "WEIR_GATEWAY__PORT": str(port),
        "WEIR_GATEWAY__RETENTION_S": "1e9",
    }
    process = subprocess.Popen([sys.executable, "-m", "gateway"], env=os.environ | given)
    try:
        answering(f"http://127.0.0.1:{port}/live", timeout_s=300)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def routes(sessions: int) -> Mapping[str, str]:
    """The data routes of the views, by what they show."""
    middle = session_name(sessions // 2)
    turn = turn_name(middle, 3)
    return {
        "the newest 100 sessions": "/sessions?order=newest",
        "by task, 100 of 1 in 50": "/sessions?order=newest&task_id=task-007",
        "by a task that no session has": "/sessions?order=newest&task_id=none",
        "by verdict and reward": "/sessions?order=newest&verdict=trained&min_reward=0.9",
        "by a part of the id": f"/sessions?order=newest&id={middle[-4:]}",
        "by version": "/sessions?order=newest&trained_version=3",
        "by group": f"/sessions?group_id={group_name(sessions // 2)}",
        "one session": f"/sessions/{middle}",
        "the tokens of a turn": f"/sessions/{middle}?tokens=true&token_texts=true&turn_id={turn}",
        "a group's advantages": f"/admin/groups/{group_name(sessions // 2)}",
        "the pipeline": "/admin/pipeline",
    }


def timed(client: httpx.Client, path: str, repetitions: int) -> tuple[list[float], int]:
    """Milliseconds of each request, and the bytes of the last answer."""
    took, size = [], 0
    for _ in range(repetitions):
        began = time.perf_counter()
        reply = client.get(path)
        took.append(1000 * (time.perf_counter() - began))
        reply.raise_for_status()
        size = len(reply.content)
    return took, size


def show(name: str, took: Sequence[float], size: int) -> None:
    p95 = sorted(took)[int(0.95 * (len(took) - 1))]
    print(f"{name:32} p50 {statistics.median(took):8.1f} ms   p95 {p95:8.1f} ms   {size:8d} bytes")


def paints(url: str) -> tuple[list[float], list[float]]:
    """Milliseconds until something is drawn, and until the newest sessions are there."""
    first, rows = [], []
    with chromium() as browser:
        context = context_of(browser, WIDE)
        tab = watched_tab(context).tab
        tab.goto(url)
        tab.get_by_label("API key").fill(KEY)
        tab.get_by_role("button", name="Sign in").click()
        tab.get_by_role("navigation").wait_for()
        for _ in range(FIRST_PAINTS):
            tab.goto("about:blank")
            tab.goto(f"{url}/#/sessions")
            tab.locator("table a").first.wait_for()
            rows.append(tab.evaluate("performance.now()"))
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            first.append(tab.evaluate(paint))
        context.close()
    return first, rows


def curves(folder: Path, steps: int) -> None:
    from trainer_service.curves import Curves

    path = folder / "metrics.jsonl"
    more = {f"more/{n}": 0.123456 + n for n in range(100)}
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(metrics_of(step) | more) + "\n")
    read, names = Curves(path), ["reward_mean", "loss", "grad_norm", "entropy", "mismatch/kl"]
    for name in ("the first time", "again"):
        took, complete = [], False
        while not complete:
            began = time.perf_counter()
            complete = read.read(names, None, None, 1000).complete
            took.append(1000 * (time.perf_counter() - began))
        parts = ", ".join(f"{each:.0f}" for each in took)
        print(f"five curves of {steps} steps ({path.stat().st_size / 2**20:.0f} MiB), {name}: {parts} ms")


def resident_mib(pid: int) -> float:
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in each)
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--model", type=Path, help="a model's folder (default: a tiny model is made)")
    given = parser.parse_args()
    sessions, began = given.turns // TURNS, 1.7e9
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or _tiny_model(folder / "model")
        curves(folder, given.steps)
        redis = RedisProcess(folder / "redis").start(appendonly="no", save="")
        try:
            with gateway(model, redis.url) as (url, pid):
                fill(redis, sessions, began)
                print(f"the gateway has {resident_mib(pid):.0f} MiB before any request")
                measure(url, sessions, given.repetitions)
                print(f"the gateway has {resident_mib(pid):.0f} MiB at the end")
        finally:
            redis.close()


def measure(url: str, sessions: int, repetitions: int) -> None:
    """Print what each route and the first paint take."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        for what, path in routes(sessions).items():
            show(what, *timed(client, path, repetitions))
    first, rows = paints(url)
    show("first paint of the sessions", first, 0)
    show("their rows are there", rows, 0)


def _tiny_model(folder: Path) -> Path:
    from tests.support.tiny_model import make_tiny_model  # imports torch

    return make_tiny_model(folder)


if __name__ == "__main__":
    main()
