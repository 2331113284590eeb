"""`weir audit` of a real trainer on a real Redis finds no fault in sound runs, and the ids of each fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from rollout_queue.contract.codec import decode, encode
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.redis import key_names
from tests.support.serving import NOBODY
from tests.support.trainer_service.crash import Crash, crash
from tests.support.trainer_service.harness import MakeHarness, turn
from tests.support.trainer_service.redis_trainer import RedisTrainer
from trainer_service.storage import checkpoint
from weir.__main__ import app


class Audited(RedisTrainer):
    """A trainer on a Redis, and the command that audits both."""

    def audit(self, *flags: str) -> tuple[int, dict[str, Any]]:
        """The exit code, and the report as JSON."""
        where = ["--redis-url", self.url, "--trainer-url", NOBODY]
        where += ["--checkpoint-dir", str(self.harness.settings.checkpoint_dir)]
        result = CliRunner().invoke(app, ["audit", "--json", *where, *flags])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, json.loads(result.stdout)

    def finds(self) -> tuple[int, set[tuple[str, str, str]]]:
        """The exit code, and each finding's kind, rule and subject."""
        code, report = self.audit()
        return code, found(report)

    def step(self, group_id: str) -> None:
        self.agents.group(group_id, [1.0, 0.0])
        assert self.runs_once()

    def dies(self, owner: object, name: str, death: Callable[..., object] = crash) -> None:
        """The trainer runs until it calls this method, and dies there."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, death)
            with pytest.raises(Crash):
                self.runs_once()


@pytest.fixture
def audited(
    make_harness: MakeHarness, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Audited:
    monkeypatch.setattr("weir.audit.audit.PAUSE_S", 0.01)
    monkeypatch.setenv("WEIR_STACK__RUN_DIR", str(tmp_path / "run"))
    return Audited(make_harness, redis, redis_url)


def found(report: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {(each["kind"], each["rule"], each["subject"]) for each in report["findings"]}


def entry_of(redis: Redis, turn_id: str) -> tuple[bytes, bytes]:
    entries: Any = redis.xrange(key_names.STREAM)
    for entry_id, fields in entries:
        record = decode(fields[key_names.STREAM_FIELD])
        if isinstance(record, Turn) and record.turn_id == turn_id:
            return entry_id, fields[key_names.STREAM_FIELD]
    raise LookupError(turn_id)


def test_an_audit_of_a_sound_run_finds_nothing(audited: Audited, tmp_path: Path) -> None:
    audited.step("a")
    audited.agents.group("b", [0.0, 1.0, 0.5])
    assert audited.runs_once()
    audited.agents.group("flat", [1.0, 1.0])
    failed = Verdict(code="failed", detail="the agent said so")
    audited.agents.episode("failed", None, status="failed", verdict=failed)
    assert not audited.runs_once()
    audited.start()
    audited.agents.episode("open", None)
    audited.agents.episode("half", 1.0, ("c", 2))
    audited.runs_once()
    audited.agents.episode("late", None)
    heard = tmp_path / "heard.jsonl"
    heard.write_text(
        '{"session_id": "a-0", "turn_id": "a-0-t2"}\n'
        '{"session_id": "open", "turn_id": "open-t1"}\n'
        '{"session_id": "a-1", "reward_key": "finish", "finished": true}\n'
    )
    code, report = audited.audit("--answers", str(heard))
    assert (code, report["findings"]) == (0, [])
    totals = report["totals"]
    assert totals["fates"] == {
        "trained": {"sessions": 5, "turns": 10, "tokens": 25},
        "waiting": {"sessions": 3, "turns": 6, "tokens": 15},
        "zero_advantage": {"sessions": 2, "turns": 4, "tokens": 10},
        "failed": {"sessions": 1, "turns": 2, "tokens": 5},
    }
    assert (totals["ledger_steps"], totals["ledger_turns"]) == (2, 10)
    assert totals["ledger_tokens"] == totals["trained_tokens"] == 25
    assert (totals["pending"], totals["undelivered"]) == (6, 2)
    assert (report["looks"], report["answers"]) == (1, 3)
    assert "the ledger was read from its checkpoints" in report["notes"][0]


def test_an_audit_counts_forgotten_sessions(audited: Audited) -> None:
    audited.step("a")
    audited.agents.group("flat", [1.0, 1.0])
    audited.agents.episode("failed", None, status="failed", verdict=Verdict(code="failed", detail="so"))
    assert not audited.runs_once()
    audited.agents.episode("open", None)
    assert audited.agents.forget() == {"trained": 2, "zero_advantage": 2, "failed": 1}
    for later in ("b", "c"):
        code, report = audited.audit()
        assert (code, report["findings"]) == (0, [])
        totals = report["totals"]
        assert totals["forgotten_sessions"] == 5
        assert totals["forgotten_trained"] == {"sessions": 2, "turns": 4, "tokens": 10}
        audited.agents.group(later, [0.0, 1.0])
        assert audited.start().trainer.run_once(), "a trainer that starts again misses none of them"
    audited.redis.hincrby(key_names.FORGOTTEN, "turn:trained", 1)
    audited.redis.hincrby(key_names.VERDICTS, "turn:trained", 1)
    assert audited.finds() == (1, {("unexplained", "forgotten", "forgotten turns")})
    audited.redis.hincrby(key_names.FORGOTTEN, "turn:trained", -1)
    assert audited.finds() == (1, {("unexplained", "counter", "counter turn:trained")})


def test_an_audit_counts_a_durable_step_as_trained_before_it_is_acknowledged(audited: Audited) -> None:
    audited.agents.group("a", [1.0, 0.0])
    audited.dies(audited.harness.stream, "acknowledge")
    code, report = audited.audit()
    assert (code, report["findings"]) == (0, [])
    assert report["totals"]["fates"]["trained"] == {"sessions": 0, "turns": 4, "tokens": 10}
    assert report["totals"]["pending"] == 8
    audited.start()
    assert audited.audit()[1]["totals"]["fates"]["trained"] == {"sessions": 2, "turns": 4, "tokens": 10}


def test_a_crash_before_the_checkpoint_is_no_fault(audited: Audited) -> None:
    audited.agents.group("a", [1.0, 0.0])
    audited.dies(checkpoint, "write_atomically")
    assert audited.audit()[0] == 0
    assert audited.start().trainer.run_once()
    code, report = audited.audit()
    assert (code, report["totals"]["ledger_steps"]) == (0, 1)


def test_an_acknowledgement_before_the_checkpoint_is_caught(audited: Audited) -> None:
    audited.agents.group("a", [1.0, 0.0])
    harness = audited.harness

    def die_behind_the_acknowledgement(*_: object) -> None:
        harness.intake.acknowledge()
        raise Crash

    audited.dies(harness.checkpoints, "write", die_behind_the_acknowledgement)
    audited.start()
    turns = [f"turn a-{session}-t{number}" for session in (0, 1) for number in (1, 2)]
    lost = {("lost", "acknowledged_before_the_checkpoint", turn) for turn in turns}
    code, report = audited.audit()
    assert (code, found(report)) == (1, lost)
    assert "the durable ledger has no such step" in report["findings"][0]["sentence"]
    audited.step("b")
    code, report = audited.audit()
    assert (code, found(report)) == (1, lost)
    assert "the durable ledger has that step without this turn" in report["findings"][0]["sentence"]


def test_a_duplicate_append_is_caught(audited: Audited) -> None:
    audited.agents.group("a", [1.0, 0.0])
    _, packed = entry_of(audited.redis, "a-0-t2")
    audited.redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: packed})
    assert audited.finds() == (1, {("duplicated", "appended_twice", "turn a-0-t2")})
    assert audited.runs_once()
    assert audited.audit()[0] == 0, "the trainer recognises a second entry of the same turn"
    audited.redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: packed})
    assert audited.finds() == (1, {("unexplained", "verdict_and_entry", "turn a-0-t2")})


def test_a_generation_that_is_recorded_under_two_ids_is_caught(audited: Audited) -> None:
    audited.agents.episode("a", None)
    again = turn("a", "again", finished_at=107.0, completion_id="chatcmpl-a")
    audited.redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(again)})
    audited.redis.hset(key_names.session("a"), "t:again", encode(again))
    code, report = audited.audit()
    assert (code, {each[:2] for each in found(report)}) == (1, {("duplicated", "recorded_twice")})
    assert {"again", "a-t1"} == {
        word for word in report["findings"][0]["sentence"].split() if word in ("again", "a-t1")
    }


def test_a_dropped_turn_is_caught(audited: Audited) -> None:
    audited.agents.group("a", [1.0, 0.0])
    audited.redis.xdel(key_names.STREAM, entry_of(audited.redis, "a-0-t2")[0])
    dropped = ("lost", "dropped", "turn a-0-t2")
    assert audited.finds() == (1, {dropped})
    assert audited.runs_once()
    code, report = audited.audit()
    assert (code, found(report)) == (1, {dropped})
    assert "its session already has the verdict trained" in report["findings"][0]["sentence"]


def test_an_answer_that_was_not_recorded_is_caught(audited: Audited, tmp_path: Path) -> None:
    audited.agents.episode("a", None)
    heard = tmp_path / "heard.jsonl"
    heard.write_text('{"session_id": "a", "turn_id": "t9"}\n{"session_id": "b", "reward_key": "k"}\n')
    code, report = audited.audit("--answers", str(heard))
    assert code == 1
    assert found(report) == {
        ("lost", "answered", "session a t:t9"),
        ("lost", "answered", "session b"),
        ("lost", "answered", "session b r:k"),
    }
