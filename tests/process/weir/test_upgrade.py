"""Releases read each other's Redis and checkpoints: this tree and an earlier one, in processes."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from rollout_queue.contract.codec import SCHEMA
from rollout_queue.redis import key_names
from rollout_queue.redis.schema_version import claim_schema
from tests.support.redis_process import RedisProcess
from weir.audit.audit import audit
from weir.audit.audit_facts import ClientAnswer
from weir.audit.audit_sources import Sources

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[3]
BEFORE = "14dce7f0de9c685d4d4a5d6ea10e1ec313d1cbdf"
"""The last commit whose modules have the names of the earlier release."""
OWN_NAMES = """
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.redis.stream_writer import StreamWriter
"""
EARLIER_NAMES = """
from rollout_queue.contract.tokens import Logprobs, TokenIds
from rollout_queue.redis.writer import RedisWriter as StreamWriter
"""
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from rollout_queue.contract.records import Outcome, SessionSpec, Span, Turn
from tests.support.weir.small_trainer import SmallTrainer

url, directory, prefix, steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])

async def answer():
    async with AsyncRedis.from_url(url) as redis:
        writer = StreamWriter(redis)
        for number in range(10):
            name = f"{prefix}{number}"
            await writer.open_session(SessionSpec(session_id=name, created_at=100.0))
            turn = Turn(turn_id=f"{name}-t", session_id=name, context_ids=TokenIds([1]),
                        output_ids=TokenIds([2, 3, 4]), logprobs=Logprobs([-0.5] * 3),
                        versions=(Span(0, 0, 3),), finish="stop", started_at=1.0, finished_at=2.0,
                        completion_id=f"c-{name}")
            await writer.append_turn(turn, 4e9)
            outcome = Outcome(session_id=name, status="completed", created_at=3.0)
            await writer.append_outcome(outcome, None, None)
        await writer.close()

asyncio.run(answer())
with Redis.from_url(url) as redis:
    trainer = SmallTrainer(redis, directory)
    for _ in range(steps):
        trainer.train()
        trainer.checkpoint()
    trainer.train()  # a step that no checkpoint contains
import rollout_queue
print(json.dumps({"step": trainer.step, "from": str(Path(rollout_queue.__file__).parents[2])}))
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the earlier release."""
    packed = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        pytest.skip(f"this clone does not have the commit {BEFORE}: it is shallow, or no clone")
    directory = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path / "redis").start()
    process.client.hset(key_names.POLICIES, "0", "{}")
    yield process
    process.close()


def started(tree: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of this tree, and with its small trainer, which uses them."""
    paths = [tree, tree / "queue", tree / "deploy"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=directory
    )


def run(tree: Path, process: RedisProcess, directory: Path, prefix: str, steps: int) -> dict[str, Any]:
    """Ten sessions are answered and finished, and the trainer makes so many steps, by this tree's code."""
    program = (OWN_NAMES if tree == ROOT else EARLIER_NAMES) + PROGRAM
    done = started(tree, directory, "-P", "-c", program, process.url, str(directory), prefix, str(steps))
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["from"] == str(tree)
    return said


def audited(process: RedisProcess, directory: Path, *prefixes: str) -> None:
    told = [ClientAnswer(f"{prefix}{n}", f"{prefix}{n}-t") for prefix in prefixes for n in range(10)]
    report = audit(Sources(process.url, None, checkpoint_dir=directory), told, readings=1)
    assert [finding.sentence for finding in report.findings] == []


def audited_by(tree: Path, process: RedisProcess, directory: Path) -> None:
    where = ["--redis-url", process.url, "--checkpoint-dir", str(directory)]
    nobody = ["--trainer-url", "http://127.0.0.1:9"]
    done = started(tree, directory, "-m", "weir", "audit", *where, *nobody)
    assert done.returncode == 0, done.stdout + done.stderr


def trained_by(process: RedisProcess, prefix: str) -> set[str | None]:
    verdicts: list[Any] = [
        process.client.hget(key_names.session(f"{prefix}{n}"), "verdict") for n in range(10)
    ]
    return {json.loads(each)["code"] if each else None for each in verdicts}


def test_this_release_goes_on_where_the_earlier_one_was(
    before: Path, process: RedisProcess, tmp_path: Path
) -> None:
    first = run(before, process, tmp_path, "old", steps=2)
    audited(process, tmp_path, "old")
    claim_schema(process.client)
    second = run(ROOT, process, tmp_path, "new", steps=8)
    assert second["step"] > first["step"]
    audited(process, tmp_path, "old", "new")
    audited_by(before, process, tmp_path)
    assert trained_by(process, "old") == {"trained"}


def test_the_earlier_release_goes_on_where_this_one_was(
    before: Path, process: RedisProcess, tmp_path: Path
) -> None:
    claim_schema(process.client)
    run(ROOT, process, tmp_path, "new", steps=2)
    run(before, process, tmp_path, "old", steps=8)
    audited(process, tmp_path, "old", "new")
    audited_by(before, process, tmp_path)
    assert trained_by(process, "new") == {"trained"}


def test_this_release_refuses_a_newer_schema_and_says_so(process: RedisProcess, tiny_model: Path) -> None:
    process.client.set(key_names.SCHEMA, SCHEMA + 1)
    environment = {
        **os.environ,
        "WEIR_REDIS_URL": process.url,
        "WEIR_GATEWAY__MODEL_PATH": str(tiny_model),
        "WEIR_GATEWAY__PORT": "0",
    }
    command = [sys.executable, "-m", "gateway"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode != 0
    assert f"Redis has data of schema {SCHEMA + 1}, and this release reads up to {SCHEMA}" in done.stderr
    with Redis.from_url(process.url) as redis:
        assert redis.get(key_names.SCHEMA) == str(SCHEMA + 1).encode()
