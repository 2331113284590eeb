"""What a trainer does with its time while more sessions arrive than it can train.

python -m bench.saturation [--seconds S] [--width W] [--rows N] [--publish-every N] [--trace FILE]

agents (a process) ── sessions of the served version, always two steps ahead ──▶ Redis ──▶ trainer (a process)
a double of the gateway (this process) ◀── versions ──────────────────────────────────────────┘

The trainer has its default settings, and writes its checkpoints and versions to the disk. Its own metrics,
`seconds/*`, time its steps. The first two steps do not count. `--trace` writes the steps as JSON lines."""

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis as AsyncRedis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.gateway import REDIS
from bench.policies import make_policy
from bench.processes import free_port, running
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, Sampling, SessionSpec, Span, Turn
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.serving import serving
from tests.support.trainer_service.harness import FakeGateway
from weir.stack.service_process import executable

VOCABULARY = 8000
PROMPT, ANSWER, GROUP = 120, 200, 8
"""Tokens of a session's prompt and answer, and sessions of a group."""
AHEAD = 2
"""How many steps' sessions wait in the stream."""
WARM_STEPS = 2
EXPIRES_AT = 4e9
PHASES = ("train", "read", "publish", "checkpoint", "acknowledge")


async def play(url: str, rows: int) -> None:
    """Write groups of sessions, sampled by the trainer's version, until this process is stopped."""
    redis = AsyncRedis.from_url(url)
    writer, rng, number = StreamWriter(redis), random.Random(0), 0
    while True:
        report = TrainerReport.of(await stored(redis.hgetall(key_names.TRAINER)))
        if (report.rollouts_waiting or 0) >= AHEAD * rows:
            await asyncio.sleep(0.05)
            continue
        for _ in range(rows // GROUP):
            await play_group(writer, rng, f"g{number}", report.version or 0)
            number += 1
        await asyncio.sleep(0.5)  # until the trainer has read them, its report does not count them


async def play_group(writer: StreamWriter, rng: random.Random, group_id: str, version: int) -> None:
    prompt = rng.choices(range(VOCABULARY), k=PROMPT)
    for member in range(GROUP):
        session_id, at = f"{group_id}-{member}", time.time()
        named: dict[str, Any] = {"session_id": session_id, "group_id": group_id}
        await writer.open_session(SessionSpec(**named, group_size=GROUP, created_at=at))
        await writer.append_turn(turn(rng, named, prompt, version, at), expires_at=EXPIRES_AT)
        outcome = Outcome(**named, status="completed", group_size=GROUP, created_at=at)
        reward = Reward(session_id=session_id, value=float(member % 2), key="finish", created_at=at)
        await writer.append_outcome(outcome, reward, None)


def turn(rng: random.Random, named: dict[str, Any], prompt: list[int], version: int, at: float) -> Turn:
    answer = rng.choices(range(VOCABULARY), k=ANSWER)
    return Turn(
        **named,
        turn_id=f"{named['session_id']}-t",
        context_ids=TokenIds(prompt),
        output_ids=TokenIds(answer),
        logprobs=Logprobs([-9.0] * ANSWER),
        versions=(Span(version, 0, ANSWER),),
        sampling=Sampling(used={"temperature": 1.0}),
        finish="stop",
        started_at=at,
        finished_at=at,
    )


def gateway() -> Starlette:
    """The routes of the gateway that publishing uses."""
    double = FakeGateway()

    async def answer(request: Request) -> Response:
        given = httpx.Request(request.method, str(request.url), content=await request.body())
        reply = double(given)
        return Response(reply.content, reply.status_code, media_type="application/json")

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "DELETE"])])


def settings(root: Path, redis_url: str, gateway_url: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The section `trainer` of weir.yaml."""
    return {
        "model_path": str(root / "model"),
        "checkpoint_dir": str(root / "checkpoints"),
        "policies_dir": str(root / "policies"),
        "metrics_path": str(root / "metrics.jsonl"),
        "redis_url": redis_url,
        "gateway_url": gateway_url,
        "port": free_port(),
        "threads": 1,
        "device": "cpu",
        "publish_every_steps": asked.publish_every,
        "optimizer": {"lr": 1e-6},
        "algorithm": {"min_live_rows": asked.rows, "max_rows": asked.rows},
        # The log-probabilities are invented, so that these guards would always alarm.
        "guards": {"max_abs_logp": None, "max_kl": None},
    }


def measured(root: Path, asked: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of each step that counts."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": asked.width,
        "intermediate_size": 3 * asked.width,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
    }
    make_policy(root / "model", shape)
    port, metrics = free_port(), root / "metrics.jsonl"
    url = f"redis://127.0.0.1:{port}/0"
    module = [sys.executable, "-m"]
    with (
        running([executable(), *REDIS.split(" "), "--port", str(port), "--dir", str(root)]),
        serving(gateway()) as gateway_url,
    ):
        config = root / "weir.json"
        config.write_text(json.dumps({"trainer": settings(root, url, gateway_url, asked)}), encoding="utf-8")
        players = running([*module, "bench.saturation", "--play", url, "--rows", str(asked.rows)])
        trainer = running([*module, "trainer_service", "--config", str(config)], ends_within_s=120)
        with trainer, players:
            return steps_in(metrics, asked.seconds)


def steps_in(path: Path, seconds: float) -> list[dict[str, float]]:
    """The steps of this time, which begins after the first ones. Waits for them."""
    while True:
        time.sleep(1)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        steps = [json.loads(line) for line in lines if "tokens" in line][WARM_STEPS:]
        if steps and steps[-1]["time"] - steps[0]["time"] >= seconds:
            return steps


def print_shares(steps: list[dict[str, float]]) -> None:
    whole_s = steps[-1]["time"] - steps[0]["time"]
    spent = {name: sum(step.get(f"seconds/{name}", 0.0) for step in steps[1:]) for name in PHASES}
    spent["other"] = whole_s - sum(spent.values())
    tokens = sum(step["tokens"] for step in steps[1:])
    print(f"{len(steps) - 1} steps with {tokens:.0f} trained tokens in {whole_s:.1f} s", end=", ")
    print(f"staleness {sum(step['staleness/total_mean'] for step in steps[1:]) / (len(steps) - 1):.2f}\n")
    print("| the trainer's main thread | s | share |\n|---|---|---|")
    for name, seconds in spent.items():
        print(f"| {name} | {seconds:.2f} | {seconds / whole_s:.1%} |")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--width", type=int, default=128, help="the width of the model's four layers")
    parser.add_argument("--rows", type=int, default=64, help="of a step")
    parser.add_argument("--publish-every", type=int, default=1, help="steps")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--play", metavar="URL", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.play:
        asyncio.run(play(asked.play, asked.rows))
    root = Path(tempfile.mkdtemp(prefix="weir-saturation-"))
    try:
        steps = measured(root, asked)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if asked.trace:
        asked.trace.write_text("".join(f"{json.dumps(step)}\n" for step in steps), encoding="utf-8")
    print_shares(steps)


if __name__ == "__main__":
    main()
