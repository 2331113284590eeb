"""`weir audit` on a real Redis: its sources, output and exit codes. Live traffic is not taken for a fault."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from typer.testing import CliRunner

from rollout_queue.contract.codec import SCHEMA, encode
from rollout_queue.contract.head import Tombstone, encode_tombstone
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import (
    LateJoin,
    Outcome,
    Reward,
    SessionSpec,
    Span,
    Turn,
    TurnImage,
    Verdict,
)
from rollout_queue.contract.stream import Verdicts
from rollout_queue.http.callers import Keyring
from rollout_queue.http.http_server import HttpThread
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.redis_clients import redis_at
from tests.support.serving import NOBODY, free_port
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.app import create_app
from trainer_service.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.storage.run_state import LedgerStep
from weir.__main__ import app
from weir.audit.audit import audit
from weir.audit.audit_sources import Sources
from weir.audit.evidence import EvidenceMissing, read_ledger
from weir.stack.service_process import http_ready


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with redis_at(redis_url) as client:
        client.flushdb()
        client.hset(key_names.POLICIES, "0", "{}")
        yield client


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weir.audit.audit.PAUSE_S", 0.01)
    monkeypatch.setenv("WEIR_STACK__RUN_DIR", str(tmp_path / "run"))


@pytest.fixture
def sources(redis: Redis, redis_url: str, tmp_path: Path) -> Sources:
    """This Redis, and a trainer that is not running and never finished a checkpoint."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    return Sources(redis_url, NOBODY, checkpoint_dir=directory)


def invoked(sources: Sources, *flags: str) -> tuple[int, str]:
    where = ["--redis-url", sources.redis_url, "--trainer-url", str(sources.trainer_url)]
    where += ["--checkpoint-dir", str(sources.checkpoint_dir)]
    result = CliRunner().invoke(app, ["audit", *where, *flags])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def turn_of(session_id: str, number: int = 0, tokens: int = 3, **fields: Any) -> Turn:
    given: dict[str, Any] = {
        "context_ids": TokenIds([1, 2]),
        "output_ids": TokenIds(range(tokens)),
        "logprobs": Logprobs([-0.5] * tokens),
        "versions": (Span(0, 0, tokens),),
        "finish": "stop",
        "started_at": 100.0 + number,
        "finished_at": 101.0,
        "completion_id": f"chatcmpl-{session_id}",
    }
    return Turn(turn_id=f"{session_id}-t{number}", session_id=session_id, **(given | fields))


def put(redis: Redis, session_id: str, turns: int = 1) -> bytes:
    """Write a session as a gateway does; return the id of its last entry."""
    return put_turns(redis, session_id, [turn_of(session_id, number) for number in range(turns)])


def put_turns(redis: Redis, session_id: str, turns: Sequence[Turn], **terms: Any) -> bytes:
    entry_id: Any = b""
    spec = encode(SessionSpec(session_id=session_id, created_at=100.0, **terms))
    redis.hset(key_names.session(session_id), "spec", spec)
    redis.zadd(key_names.SESSIONS, {session_id: 100.0})
    for each in turns:
        packed = encode(each)
        redis.hset(key_names.session(session_id), f"t:{each.turn_id}", packed)
        entry_id = redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: packed})
    return bytes(entry_id)


def file_ledger(directory: Path, rows: Sequence[LedgerStep], durable: int) -> list[bytes]:
    """A checkpoint that contains the first `durable` rows; returns all lines."""
    lines = [msgspec.json.encode(row) + b"\n" for row in rows]
    (directory / "ledger.jsonl").write_bytes(b"".join(lines))
    tag = f"00000001-step-{durable:08d}"
    (directory / tag).mkdir()
    (directory / tag / "state.json").write_text(json.dumps({"ledger_bytes": len(b"".join(lines[:durable]))}))
    (directory / "CURRENT").write_text(tag)
    return lines


def test_a_person_reads_lines_and_the_exit_code_says_the_rest(sources: Sources, redis: Redis) -> None:
    put(redis, "s1", turns=2)
    code, said = invoked(sources)
    assert code == 0
    assert "waiting: 1 session, 2 turns, 6 tokens" in said
    assert "every turn was trained once, waits, or has a final verdict" in said
    redis.xdel(key_names.STREAM, put(redis, "s2"))
    code, said = invoked(sources)
    assert code == 1
    assert "lost: turn s2-t0 of session s2 has neither an unacknowledged entry nor a verdict" in said
    assert "found 1 lost; each was found in 3 readings" in said


def test_in_a_container_the_address_of_redis_stands_in_a_file(
    sources: Sources, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(redis, "s1")
    file = tmp_path / "redis_url"
    file.write_text(f"{sources.redis_url}\n")
    monkeypatch.setenv("WEIR_REDIS_URL_FILE", str(file))
    result = CliRunner().invoke(app, ["audit", "--checkpoint-dir", str(sources.checkpoint_dir)])
    assert (result.exit_code, "waiting: 1 session" in result.output) == (0, True), result.output
    file.write_text("\n")
    result = CliRunner().invoke(app, ["audit", "--checkpoint-dir", str(sources.checkpoint_dir)])
    assert (result.exit_code, f"WEIR_REDIS_URL_FILE: {file} is empty" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--redis-url", f"redis://:hush@127.0.0.1:{free_port()}/0"], "weir: Redis at redis://127.0.0.1:"),
        (["--checkpoint-dir", "nowhere"], "nowhere is not a directory of checkpoints"),
        (["--answers", "nothing.jsonl"], "weir: nothing.jsonl: "),
    ],
)
def test_evidence_that_cannot_be_read_is_no_verdict(
    sources: Sources, redis: Redis, flags: Sequence[str], sentence: str
) -> None:
    code, said = invoked(sources, *flags)
    assert (code, sentence in said) == (2, True), said
    assert "hush" not in said


def test_answers_that_are_cut_or_strange_are_refused(sources: Sources, tmp_path: Path) -> None:
    for line in ('{"session_id": "a", "turn', '{"session_id": "a", "turn": "t1"}', '{"turn_id": "t1"}'):
        file = tmp_path / "heard.jsonl"
        file.write_text('{"session_id": "a"}\n' + line + "\n")
        assert invoked(sources, "--answers", str(file))[0] == 2


def rows(count: int) -> list[LedgerStep]:
    return [LedgerStep(step, step, True, [f"t{step}"], [f"s{step}"], 3) for step in range(1, count + 1)]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[tuple[str, SharedState]]:
    """A trainer's HTTP interface whose ledger has more rows than a page."""
    held = rows(2500)

    def ledger(since: int, limit: int) -> list[LedgerStep]:
        return [row for row in held if row.step > since][:limit]

    shared_state = SharedState()
    store = PolicyStore(tmp_path / "policies", tmp_path, 2)
    served = create_app(shared_state, ledger, store, Keyring(["client"], ["admin"]), CollectorRegistry())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with HttpThread(served, "127.0.0.1", port):
        wait_until(lambda: http_ready(url)() != "it does not answer yet")
        yield url, shared_state


def test_the_whole_ledger_is_read_page_by_page_with_the_admins_key(trainer: tuple[str, SharedState]) -> None:
    url, shared_state = trainer
    shared_state.ready = True
    ledger = read_ledger(url, "admin", None)
    assert [row.step for row in ledger.rows] == list(range(1, 2501))
    assert (ledger.source, ledger.remark) == (f"{url}/ledger", None)
    with pytest.raises(EvidenceMissing, match="403"):
        read_ledger(url, "client", None)


def test_a_trainer_that_has_not_restored_is_not_asked_for_its_ledger(
    trainer: tuple[str, SharedState], tmp_path: Path
) -> None:
    """Its ledger would be empty, as if nothing had ever been trained."""
    url, _ = trainer
    with pytest.raises(EvidenceMissing, match="503"):
        read_ledger(url, "admin", None)
    lines = file_ledger(tmp_path, rows(3), durable=2)
    ledger = read_ledger(url, "admin", tmp_path)
    assert [row.step for row in ledger.rows] == [1, 2], "the third row has no finished checkpoint"
    assert "read from its checkpoints" in str(ledger.remark)
    (tmp_path / "ledger.jsonl").write_bytes(lines[0])
    with pytest.raises(EvidenceMissing, match="shorter than checkpoint"):
        read_ledger(url, "admin", tmp_path)


def test_what_may_never_be_trained_is_caught_in_the_ledger(sources: Sources, redis: Redis) -> None:
    turns = [
        turn_of("s1", 0, finish="abort"),
        turn_of("s1", 1),
        turn_of("s1", 2, relation="retry", retry_of="s1-t1"),
        turn_of("s1", 3, train=False),
        turn_of("s1", 4, tokens=0),
    ]
    put_turns(redis, "s1", turns)
    put_turns(redis, "s2", [turn_of("s2")], train=False)
    trained = [*(turn.turn_id for turn in turns), "s2-t0"]
    row = LedgerStep(1, 1, True, trained, ["s1", "s2"], 15)
    assert sources.checkpoint_dir is not None
    file_ledger(sources.checkpoint_dir, [row], durable=1)
    sentences = [finding.sentence for finding in audit(sources).findings]
    assert sentences == [
        f"turn {name} was trained by step 1, although {why}"
        for name, why in [
            ("s1-t0 of session s1", "its call was aborted"),
            ("s1-t1 of session s1", "a retry has replaced it"),
            ("s1-t3 of session s1", "it was not for training"),
            ("s1-t4 of session s1", "it has no output"),
            ("s2-t0 of session s2", "it was not for training"),
        ]
    ]


def test_what_was_deleted_is_missed_by_nobody(sources: Sources, redis: Redis, tmp_path: Path) -> None:
    put(redis, "s1")
    heard = tmp_path / "heard.jsonl"
    heard.write_text('{"session_id": "s1", "turn_id": "s1-t0"}\n')
    redis.delete(key_names.session("s1"), key_names.STREAM)
    assert invoked(sources, "--answers", str(heard))[0] == 1
    stone = Tombstone(session_id="s1", created_at=100.0, deleted_at=200.0, turns=1, rewards=0)
    redis.hset(key_names.DELETED, "s1", encode_tombstone(stone))
    redis.hset(key_names.VERDICTS, "session:deleted", "1")
    code, said = invoked(sources, "--answers", str(heard))
    assert (code, "1 deleted sessions" in said) == (0, True), said


def test_a_session_that_the_list_of_sessions_lacks_is_looked_at_all_the_same(
    sources: Sources, redis: Redis
) -> None:
    put(redis, "s1")
    redis.zrem(key_names.SESSIONS, "s1")
    report = audit(sources)
    assert (report.findings, report.totals.fates["waiting"].turns) == ((), 1)


def test_what_was_set_aside_is_told_and_not_lost(sources: Sources, redis: Redis) -> None:
    """A trainer of an older build could not read the entry, and this build can."""
    entry_id = put(redis, "s1")
    redis.xdel(key_names.STREAM, entry_id)
    letter = {key_names.STREAM_FIELD: encode(turn_of("s1")), b"entry": entry_id, b"error": b"schema 9"}
    redis.xadd(key_names.DEAD_LETTERS, letter)  # type: ignore[arg-type]
    report = audit(sources)
    assert report.findings == ()
    assert (report.totals.fates["set aside"].turns, report.totals.dead_letters) == (1, 1)
    assert "1 records could not be decoded and are in the dead letters" in report.notes


def test_an_image_that_is_gone_is_named_with_its_session(sources: Sources, redis: Redis) -> None:
    image = TurnImage("a" * 64, 0, 1, 32, 32, (1, 2, 2))
    put_turns(redis, "s1", [turn_of("s1", images=(image,))])
    redis.set(key_names.image(image.sha256), b"png")
    assert audit(sources).findings == ()
    redis.delete(key_names.image(image.sha256))
    (finding,) = audit(sources).findings
    assert (finding.kind, finding.rule, finding.session_id) == ("lost", "no_image", "s1")


def test_a_late_join_is_known_and_awaited_by_nobody(sources: Sources, redis: Redis) -> None:
    put(redis, "s1")
    joined = encode(LateJoin(session_id="s1", created_at=102.0, group_id="g", group_size=2))
    redis.hset(key_names.session("s1"), "joined", joined)
    entry_id: Any = redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: joined})
    assert audit(sources).findings == ()
    redis.xdel(key_names.STREAM, entry_id)
    assert audit(sources).findings == ()
    redis.hdel(key_names.session("s1"), "joined")
    redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: joined})
    assert [finding.rule for finding in audit(sources).findings] == ["unknown_entry"]


def test_a_record_of_a_newer_build_stops_no_audit(sources: Sources, redis: Redis) -> None:
    put(redis, "s1")
    newer = bytes([SCHEMA + 1]) + b"whatever"
    redis.hset(key_names.session("s1"), "t:newer", newer)
    report = audit(sources)
    assert [finding.rule for finding in report.findings] == ["unreadable"]
    redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: newer})
    report = audit(sources)
    assert report.ok
    assert "the stream has entries that this build cannot decode" in " ".join(report.notes)


def test_pending_entries_are_told_from_acknowledged_ones(sources: Sources, redis: Redis) -> None:
    first, second, third = (put(redis, name) for name in ("s1", "s2", "s3"))
    redis.xgroup_create(key_names.STREAM, key_names.GROUP, id="0")
    redis.xreadgroup(key_names.GROUP, key_names.CONSUMER, {key_names.STREAM: ">"}, count=2)
    redis.xack(key_names.STREAM, key_names.GROUP, second)
    report = audit(sources)
    assert (report.totals.pending, report.totals.undelivered) == (1, 1)
    assert [finding.turn_id for finding in report.findings] == ["s2-t0"]
    redis.xdel(key_names.STREAM, first, third)
    report = audit(sources)
    assert [finding.turn_id for finding in report.findings] == ["s1-t0", "s2-t0", "s3-t0"]


class Live:
    """A gateway that appends and a trainer that acknowledges, without pause, until the context ends."""

    def __init__(self, redis: Redis, url: str) -> None:
        self._redis, self._url = redis, url
        self._ending = threading.Event()
        self.settled = 0
        self._threads = [threading.Thread(target=self._train), threading.Thread(target=self._write)]

    def __enter__(self) -> "Live":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        asyncio.run(self._episodes())

    async def _episodes(self) -> None:
        redis = AsyncRedis.from_url(self._url, socket_timeout=PATIENCE_S)
        writer, number = StreamWriter(redis, append_within_s=PATIENCE_S), 0
        while not self._ending.is_set():
            name, number = f"live-{number}", number + 1
            await writer.open_session(SessionSpec(session_id=name, created_at=100.0))
            for turn in range(3):
                await writer.append_turn(turn_of(name, turn), expires_at=1e12)
            reward = Reward(session_id=name, value=1.0, key="finish", created_at=103.0)
            outcome = Outcome(session_id=name, status="completed", created_at=103.0)
            await writer.append_outcome(outcome, reward, None)
        await writer.close()
        await redis.aclose()

    def _train(self) -> None:
        lease = Lease(self._redis, 1000.0)
        lease.claim()
        reader = StreamReader(self._redis, lease.token)
        stale, held = Verdict(code="stale"), dict[str, list[str]]()
        while not self._ending.is_set():
            for entry in reader.read(100, 0.01):
                mine = held.setdefault(entry.record.session_id, [])
                mine.append(entry.entry_id)
                if isinstance(entry.record, Outcome):
                    name = entry.record.session_id
                    turns = {(name, f"{name}-t{number}"): stale for number in range(3)}
                    reader.acknowledge(held.pop(name), Verdicts({name: stale}, turns))
                    self.settled += 1


def test_live_traffic_is_no_fault_and_hides_none(sources: Sources, redis: Redis, redis_url: str) -> None:
    redis.xdel(key_names.STREAM, put(redis, "dropped"))
    with Live(redis, redis_url) as live:
        wait_until(lambda: live.settled > 20)
        reports = [audit(sources) for _ in range(5)]
        before = live.settled
        wait_until(lambda: live.settled > before)
    assert [[finding.turn_id for finding in report.findings] for report in reports] == [["dropped-t0"]] * 5
