"""A trainer learns from imported sessions as it does from those that agents have just ended."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from rollout_queue.contract.episodes import row_of, session_part
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Verdict
from rollout_queue.contract.rows import ExportRow, row_to_json
from rollout_queue.memory import MemoryStream
from rollout_queue.redis import keys
from rollout_queue.redis.heads.reading import read_head
from tests.support.claimed import claimed_reader
from tests.support.redis_clients import redis_at
from tests.support.trainer_service.harness import MakeHarness, turn
from weir.importing.run import ImportReport, import_files

READY = Verdict(code="ready", detail="waits for a step of the trainer")


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with redis_at(redis_url) as client:
        client.flushdb()
        yield client


def rows_of_a_group(name: str, values: list[float]) -> list[ExportRow]:
    """Rows of a group with the timestamps of an old export."""
    rows = []
    for number, value in enumerate(values):
        session_id = f"{name}-{number}"
        spec = SessionSpec(session_id=session_id, group_id=name, group_size=len(values), created_at=100.0)
        turns = (turn(session_id, f"{session_id}-t", output_ids=[10 + number, 20 + number, 1]),)
        reward = Reward(session_id=session_id, value=value, key="finish", created_at=103.0)
        outcome = Outcome(session_id=session_id, status="completed", created_at=103.0, group_id=name)
        head = SessionHead(spec=spec, turns=turns, rewards=(reward,), outcome=outcome)
        part = session_part(head, READY)
        rows += [row_of(head, part, each, READY, f"{session_id}/{each.turn_id}") for each in turns]
    return rows


def imported(redis: Redis, rows: list[ExportRow], path: Path, prefix: str = "") -> ImportReport:
    path.write_bytes(b"".join(row_to_json(row) + b"\n" for row in rows))
    return import_files(redis, [path], prefix, True, print)


def head_of(redis: Redis, session_id: str) -> SessionHead:
    fields: Any = redis.hgetall(keys.session(session_id))
    head = read_head(fields)
    assert head is not None
    return head


def test_imported_sessions_are_trained_and_say_so(
    make_harness: MakeHarness, redis: Redis, tmp_path: Path
) -> None:
    imported(redis, rows_of_a_group("g", [0.0, 1.0]), tmp_path / "export")
    harness = make_harness(stream=cast(MemoryStream, claimed_reader(redis))).start()
    assert harness.trainer.run_once()
    for name in ("g-0", "g-1"):
        verdict = head_of(redis, name).verdict
        assert verdict is not None
        assert (verdict.code, verdict.step, verdict.version) == ("trained", 1, 1)
    again = imported(redis, rows_of_a_group("g", [0.0, 1.0]), tmp_path / "export")
    assert (again.sessions, again.existing) == (0, 2)
    assert not harness.trainer.run_once()
    assert imported(redis, rows_of_a_group("g", [0.0, 1.0]), tmp_path / "export", "again-").sessions == 2
    assert harness.trainer.run_once()
    assert head_of(redis, "again-g-1").verdict == Verdict(code="trained", step=2, version=2)


def test_a_trainer_that_reads_meanwhile_waits_for_the_rest_of_an_old_group(
    make_harness: MakeHarness, redis: Redis, tmp_path: Path
) -> None:
    rows = rows_of_a_group("g", [0.0, 1.0, 1.0])
    stream = cast(MemoryStream, claimed_reader(redis))
    harness = make_harness(stream=stream, algorithm={"group_wait_s": 3600.0}).start()
    imported(redis, rows[:2], tmp_path / "export")
    assert not harness.trainer.run_once()
    assert not harness.trainer.run_once()  # nothing is left to read, and the records are a year old
    imported(redis, rows[2:], tmp_path / "export")
    assert harness.trainer.run_once()
    assert all(head_of(redis, f"g-{number}").verdict is not None for number in range(3))
    ended = head_of(redis, "g-0").outcome
    assert ended is not None
    assert ended.created_at == 103.0 < time.time()  # only the stream's entry id is new
