"""The cost of the page with a long run in Redis: each route of its data views, the first paint, and memory.

python -m bench.page [--turns N] [--steps N] [--repetitions N] [--model FOLDER]

templates ── RedisWriter ──▶ Redis ── a script copies them under other ids ──▶ a run of N turns
                               └──▶ gateway ──▶ routes, timed one by one; and a browser

The copies are what the writer would have stored: their ids have the same length, and each stands wherever the
template's stood. So 100,000 sessions take a minute to make. The stream is emptied, as a trainer leaves it.
"""

import argparse
import asyncio
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
from typing import Any

import httpx
import msgspec
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from bench.processes import answering
from rollout_queue.contract.codec import encode
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Span, Turn, Verdict
from rollout_queue.contract.tokens import Logprobs, TokenIds
from rollout_queue.redis import keys
from rollout_queue.redis.writer import RedisWriter
from tests.support.page.browser import WIDE, chromium, context_of, watched_tab
from tests.support.page.run_metrics import metrics_of
from tests.support.redis_process import RedisProcess
from tests.support.serving import free_port

KEY = "bench-admin-key"
TURNS, GROUP = 10, 8
CONTEXT, OUTPUT = 60, 40
TASKS = 50
COPIES_AT_ONCE = 25
FIRST_PAINTS = 5

COPY = """
-- KEYS: template, sessions, settled
-- ARGV: its id and group, as patterns; prefixes of sessions and groups; for each copy: id, group, time, spec
local fields = redis.call('HGETALL', KEYS[1])
for at = 5, #ARGV, 4 do
    local id, group, time, spec = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    local copied = {}
    for field = 1, #fields, 2 do
        copied[field] = string.gsub(fields[field], ARGV[1], id)
        copied[field + 1] = string.gsub(string.gsub(fields[field + 1], ARGV[1], id), ARGV[2], group)
        if fields[field] == 'spec' then copied[field + 1] = spec end
    end
    redis.call('HSET', ARGV[3] .. id, unpack(copied))
    redis.call('ZADD', KEYS[2], time, id)
    redis.call('ZADD', KEYS[3], time * 1000, id)
    redis.call('HSET', ARGV[4] .. group, 'size', '8', 'owner', '')
    redis.call('SADD', ARGV[4] .. group .. ':members', id)
end
"""


def session_name(number: int) -> str:
    return f"run-{number:010d}"


def group_name(number: int) -> str:
    return f"grp-{number // GROUP:010d}"


def spec_of(number: int, began: float) -> SessionSpec:
    return SessionSpec(
        session_id=session_name(number),
        task_id=f"task-{number // GROUP % TASKS:03d}",
        group_id=group_name(number),
        group_size=GROUP,
        user=f"user-{number % 20:02d}",
        created_at=began + number,
        metadata={"suite": "bench", "difficulty": number % 5},
    )


async def write_templates(redis: AsyncRedis, began: float) -> None:
    """The sessions of one group of each task, through the real writer."""
    writer = RedisWriter(redis)
    for number in range(TASKS * GROUP):
        spec = spec_of(number, began)
        await writer.open_session(spec)
        for place in range(TURNS):
            await writer.append_turn(turn_of(spec, place), expires_at=spec.created_at + 1e9)
        reward = Reward(
            session_id=spec.session_id, value=number % 5 / 4, key="finish", created_at=spec.created_at
        )
        outcome = Outcome(session_id=spec.session_id, status="completed", created_at=spec.created_at)
        code: Any = "trained" if number % 4 else "zero_advantage"
        verdict = Verdict(
            code=code, detail="all rewards are equal", step=number % 1000, version=number % 1000
        )
        await writer.append_outcome(outcome, reward, verdict)
        turns = {f"v:{turn_id(spec, place)}": msgspec.json.encode(verdict) for place in range(TURNS)}
        await redis.hset(keys.session(spec.session_id), mapping=turns)  # type: ignore[arg-type]
    await writer.close()


def turn_id(spec: SessionSpec, place: int) -> str:
    return f"turn-{spec.session_id}-{place:03d}"


def turn_of(spec: SessionSpec, place: int) -> Turn:
    return Turn(
        turn_id=turn_id(spec, place),
        session_id=spec.session_id,
        parent_id=turn_id(spec, place - 1) if place else None,
        group_id=spec.group_id,
        task_id=spec.task_id,
        relation="extends" if place else "root",
        context_ids=TokenIds(40 + (place * 7 + i) % 200 for i in range(CONTEXT)),
        output_ids=TokenIds(40 + (place * 11 + i) % 200 for i in range(OUTPUT)),
        logprobs=Logprobs([-0.25] * OUTPUT),
        versions=(Span(int(spec.created_at) % 900, 0, OUTPUT),),
        finish="stop",
        started_at=spec.created_at + place,
        finished_at=spec.created_at + place + 0.5,
    )


def copy_templates(redis: Redis, sessions: int, began: float) -> None:
    """Copies until there are so many sessions. Each group is a copy of a group."""
    script, templates = redis.register_script(COPY), TASKS * GROUP
    for first in range(templates):
        old = [session_name(first), group_name(first)]
        fixed = [*(each.replace("-", "%-") for each in old), keys.session(""), keys.group("")]
        for start in range(first + templates, sessions, templates * COPIES_AT_ONCE):
            arguments: list[str | bytes | float] = [*fixed]
            for number in range(start, min(sessions, start + templates * COPIES_AT_ONCE), templates):
                arguments += [session_name(number), group_name(number), began + number]
                arguments.append(encode(spec_of(number, began)))
            script([keys.session(old[0]), keys.SESSIONS, keys.SETTLED], arguments)


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
    turn = f"turn-{middle}-003"
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
    from trainer_service.sinks.curves import Curves

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


def fill(redis: RedisProcess, sessions: int, began: float) -> None:
    """Store the run, and print what it takes."""
    started, last = time.perf_counter(), keys.session(session_name(sessions - 1))
    asyncio.run(_write(redis.url, began))
    copy_templates(redis.client, sessions, began)
    redis.client.delete(keys.STREAM, keys.DEADLINES)
    facts: Any = redis.client.info("memory")
    made = f"{sessions} sessions, {sessions * TURNS} turns in {time.perf_counter() - started:.0f} s"
    print(f"{made}; Redis has {facts['used_memory'] / 2**20:.0f} MiB")
    whole: Any = redis.client.memory_usage(last, samples=0)
    sums: Any = redis.client.hget(last, "turns")
    redis.client.hdel(last, "turns")
    without: Any = redis.client.memory_usage(last, samples=0)
    redis.client.hset(last, "turns", sums)
    print(f"a session takes {whole} bytes, {whole - without} of them for the sums over its turns")


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


async def _write(url: str, began: float) -> None:
    async with AsyncRedis.from_url(url) as redis:
        await write_templates(redis, began)


if __name__ == "__main__":
    main()
