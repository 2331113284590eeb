"""A trainer on a real Redis: what dead trainers have settled, what a power cut or a broken connection takes,
imported sessions, and sessions that a trainer by commands does not train."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from redis.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError

from rollout_queue.contract.codec import decode
from rollout_queue.contract.errors import StorageUnavailable, UnknownSchema
from rollout_queue.contract.export_rows import ExportRow, row_of, row_to_json, session_part
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Outcome, Record, Reward, SessionSpec, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.consumer_scripts import ACKNOWLEDGE
from rollout_queue.redis.record_restore import requeue
from rollout_queue.redis.session_heads import read_head
from rollout_queue.redis.settings import RedisSettings
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.claimed import claimed_reader
from tests.support.long_cases import cases
from tests.support.queue.records import turn as agents_turn
from tests.support.redis_clients import async_redis_at
from tests.support.redis_process import RedisProcess
from tests.support.trainer_service.crash import Crash
from tests.support.trainer_service.harness import MakeHarness, turn
from tests.support.trainer_service.redis_trainer import RedisTrainer
from trainer_service.__main__ import connect
from trainer_service.commands.command_trainer import NOT_BY_TURNS, UntrainedTurns
from trainer_service.heartbeat import Heartbeat
from trainer_service.shared_state import SharedState
from weir.importing import ImportReport, import_files

ENDINGS = ("killed before a checkpoint", "killed after a checkpoint", "told to stop", "its disk was lost")
LATE = ("group_incomplete", "its group went on without it")


@pytest.fixture
def system(make_harness: MakeHarness, redis: Redis, redis_url: str) -> RedisTrainer:
    return RedisTrainer(make_harness, redis, redis_url)


# What a dead trainer has settled, even if no checkpoint says so


def end(system: RedisTrainer, how: str) -> None:
    """End the trainer in one of the ways in `ENDINGS`, and start its successor."""
    if how == "told to stop":
        system.harness.save()
    system.start("another" if how == "its disk was lost" else system.harness.root.name)


def settled_in_silence(system: RedisTrainer, how: str = ENDINGS[0], late: str = "") -> None:
    """Group `flat` has equal rewards and gets its verdicts without a step. A further reward of the session
    `late` arrives after the trainer's last read and before these verdicts. Then the trainer ends."""
    if how == "killed after a checkpoint":
        system.agents.group("a", [1.0, 0.0])
        assert system.runs_once()
    system.agents.group("flat", [1.0, 1.0])
    acknowledge = system.harness.stream.acknowledge

    def just_too_late(*given: Any) -> None:
        if late:
            system.agents.reward(late, 0.5)
        acknowledge(*given)
        if how != "told to stop":
            raise Crash

    with pytest.MonkeyPatch.context() as patch, suppress(Crash):
        patch.setattr(system.harness.stream, "acknowledge", just_too_late)
        system.runs_once()
    assert all(system.verdict(member) is not None for member in ("flat-0", "flat-1"))
    end(system, how)


@pytest.mark.parametrize("how", ENDINGS)
def test_a_reward_that_came_too_late_for_its_verdict_is_acknowledged_by_the_next_trainer(
    system: RedisTrainer, how: str
) -> None:
    settled_in_silence(system, how, late="flat-0")
    verdict = system.verdict("flat-0")
    assert not system.runs_once()
    assert system.pending() == 0
    assert system.verdict("flat-0") == verdict
    assert system.findings() == ()


def test_an_unknown_verdict_of_a_newer_build_counts_as_a_verdict(system: RedisTrainer) -> None:
    settled_in_silence(system, late="flat-0")
    system.redis.hset(
        key_names.session("flat-0"), "verdict", json.dumps({"code": "enlightened", "from": 2030})
    )
    system.redis.hset(key_names.session("flat-1"), "verdict", b"\xff?")
    system.agents.reward("flat-0", 1.0)
    system.start()
    assert not system.runs_once()
    assert system.pending() == 0


@pytest.mark.parametrize("how", cases([ENDINGS[0], ENDINGS[3]], long=[ENDINGS[1], ENDINGS[2]]))
def test_repeated_entries_of_a_settled_session_are_acknowledged_and_not_trained(
    system: RedisTrainer, how: str
) -> None:
    system.agents.group("live", [1.0, 0.0])
    entries: Any = system.redis.xrange(key_names.STREAM)
    assert system.runs_once()
    settled_in_silence(system, how)
    for _, fields in entries:
        system.redis.xadd(key_names.STREAM, fields)
    assert not system.runs_once()
    assert system.pending() == 0
    assert system.redis.hget(key_names.VERDICTS, "session:trained") in (b"2", b"4")


def test_what_an_older_trainer_could_not_read_is_trained_after_it_was_put_back(system: RedisTrainer) -> None:
    """The older one has read the outcome of `half-0`, and not its turn."""
    system.agents.group("half", [1.0, 0.0])
    system.agents.group("new", [1.0, 0.0])

    def older(packed: bytes) -> Record:
        record = decode(packed)
        if isinstance(record, Outcome) and record.session_id == "half-0":
            return record
        raise UnknownSchema("record schema 2; this build reads schema 1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout_queue.redis.stream_reader.decode", older)
        assert not system.runs_once()
    assert not any(system.codes().values())
    system.start()
    assert {each.fate for each in requeue(system.redis)} == {"requeued"}
    assert system.runs_once()
    assert set(system.codes().values()) == {"trained"}
    assert system.findings() == ()


@pytest.mark.parametrize("how", cases([ENDINGS[1], ENDINGS[2]], long=[ENDINGS[0], ENDINGS[3]]))
def test_members_deleted_after_their_groups_end_leave_no_entries(system: RedisTrainer, how: str) -> None:
    settled_in_silence(system, how)
    for member in ("flat-0", "flat-1"):  # after the second, nothing is left of the group
        system.agents.delete(member)
        assert not system.runs_once()
        assert system.pending() == 0
        end(system, how)
    assert system.redis.hget(key_names.VERDICTS, "session:deleted") == b"2"
    assert system.findings() == ()


@pytest.mark.parametrize("deleted", [(), ("a", "b")])
def test_a_straggler_of_a_group_that_ended_without_a_step_is_late_after_a_crash_too(
    system: RedisTrainer, deleted: tuple[str, ...]
) -> None:
    """This also holds if only tombstones are left of the group's other members."""
    system.start(group_deadline_s=60.0)
    system.agents.episode("late", None, ("g", 3))
    for session_id in ("a", "b"):
        system.agents.episode(session_id, 1.0, ("g", 3))
    assert not system.runs_once()
    assert system.verdict("a") is not None
    for session_id in deleted:
        system.agents.delete(session_id)
    system.start(group_deadline_s=60.0)
    assert not system.runs_once()
    assert system.pending() == 2, "the two turns of the member that is still open"
    system.agents.finish("late", 1.0, ("g", 3))
    assert not system.runs_once()
    assert (system.verdict("late"), system.pending(), system.findings()) == (LATE, 0, ())


def test_a_straggler_is_late_too_if_the_other_members_are_forgotten(system: RedisTrainer) -> None:
    system.start(group_deadline_s=60.0)
    system.agents.open("late", ("g", 3))
    for session_id in ("a", "b"):
        system.agents.episode(session_id, 1.0, ("g", 3))
    assert not system.runs_once()
    assert system.verdict("a") is not None
    assert system.agents.forget()
    assert system.verdict("a") is None
    system.start(group_deadline_s=60.0)
    system.agents.episode("late", 1.0, ("g", 3))
    assert not system.runs_once()
    assert (system.verdict("late"), system.pending()) == (LATE, 0)


def test_a_member_with_a_gateways_verdict_counts_in_its_group(system: RedisTrainer) -> None:
    """The gateway gives the verdict before the trainer has read the session's records."""
    system.agents.episode("a", 1.0, ("g", 3))
    system.agents.episode("b", 0.0, ("g", 3))
    failed = Verdict(code="failed", detail="the agent said so")
    system.agents.episode("failed", None, ("g", 3), status="failed", verdict=failed)
    assert system.runs_once()
    assert (system.verdict("a"), system.pending()) == (("trained", ""), 0)


def test_a_group_without_a_size_begins_anew_when_members_come_later(system: RedisTrainer) -> None:
    for pair in (("a", "b"), ("c", "d")):
        system.start(group_wait_s=1.0)
        for value, session_id in enumerate(pair):
            system.agents.episode(session_id, float(value), ("g", None))
        assert system.runs_once()
    assert system.trained() == [["a", "b"], ["c", "d"]]


def test_an_entry_of_a_session_that_redis_lost_waits_like_one_of_a_new_session(system: RedisTrainer) -> None:
    settled_in_silence(system, late="flat-0")
    system.redis.delete(key_names.session("flat-0"))
    assert not system.runs_once()
    assert system.pending() == 1


def test_the_search_for_finished_sessions_waits_for_redis(system: RedisTrainer) -> None:
    settled_in_silence(system, late="flat-0")
    reader = cast(StreamReader, system.harness.stream)
    calls: list[int] = []
    ask = reader.verdict_codes

    def away_once(session_ids: Any) -> Any:
        calls.append(len(session_ids))
        if len(calls) == 1:
            raise StorageUnavailable("Redis went")
        return ask(session_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "verdict_codes", away_once)
        assert not system.runs_once()
    assert (calls, system.pending()) == ([1, 1], 0)


# What a power cut or a broken connection takes: Redis loses its last second, and the trainer nothing


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path / "redis").start()
    yield server
    server.close()


@pytest.fixture
def fragile(make_harness: MakeHarness, server: RedisProcess) -> Iterator[RedisTrainer]:
    """A trainer on a Redis whose data file can be cut back to an earlier length."""
    # `connect` ignores this option
    connection = connect(RedisSettings(redis_url=f"{server.url}?retry_on_timeout=yes"))
    yield RedisTrainer(make_harness, connection, server.url)
    connection.close()


def cut_back(server: RedisProcess, written: int) -> None:
    server.kill()
    server.cut(written)
    server.start()


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("forgotten", ["the acknowledgement", "the delivery as well"])
def test_sessions_of_a_durable_step_are_not_trained_again(
    fragile: RedisTrainer, server: RedisProcess, forgotten: str, restarted: bool
) -> None:
    fragile.agents.group("a", [1.0, 0.0])
    appended = server.written
    delivered = 0
    acknowledge = fragile.harness.stream.acknowledge

    def noting(*given: Any) -> None:
        nonlocal delivered
        delivered = server.written
        acknowledge(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fragile.harness.stream, "acknowledge", noting)
        assert fragile.runs_once()
    assert fragile.codes() == {"a-0": "trained", "a-1": "trained"}

    cut_back(server, delivered if forgotten == "the acknowledgement" else appended)
    assert fragile.codes() == {"a-0": None, "a-1": None}
    if restarted:
        fragile.start()
    for _ in range(3):
        assert not fragile.runs_once()
    fragile.agents.group("b", [1.0, 0.0])
    assert fragile.runs_once()
    assert fragile.trained() == [["a-0", "a-1"], ["b-0", "b-1"]]
    assert fragile.codes() == dict.fromkeys(("a-0", "a-1", "b-0", "b-1"), "trained")
    assert fragile.findings() == ()


def test_turns_that_redis_forgot_stay_trained_and_the_audit_names_them(
    fragile: RedisTrainer, server: RedisProcess
) -> None:
    """Nothing of the lost turns is trained twice, and the audit does not report that all is well."""
    fragile.agents.group("a", [1.0, 0.0])
    kept = server.written
    fragile.agents.group("b", [1.0, 0.0])
    assert fragile.runs_once()
    cut_back(server, kept)
    fragile.start()
    assert not fragile.runs_once()
    fragile.agents.group("c", [1.0, 0.0])
    assert fragile.runs_once()
    assert fragile.trained() == [["a-0", "a-1", "b-0", "b-1"], ["c-0", "c-1"]]
    (finding,) = fragile.findings()
    assert (finding.kind, finding.rule, finding.subject) == ("unexplained", "unknown_turns", "step 1")
    named = {f"b-{member}-t{number}" for member in (0, 1) for number in (1, 2)}
    assert named == set(finding.sentence.partition(": ")[2].split(", "))


def broken(connection: Connection) -> RedisConnectionError:
    connection.disconnect()  # type: ignore[no-untyped-call]
    return RedisConnectionError("the network broke")


def test_entries_that_a_broken_connection_lost_on_the_way_are_read_again(
    fragile: RedisTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has delivered the entries and does not deliver them again as new."""
    fragile.agents.group("a", [1.0, 0.0])
    read, lost = Connection.read_response, list[Any]()

    def losing(connection: Connection, *given: Any, **more: Any) -> Any:
        answer: Any = read(connection, *given, **more)
        if isinstance(answer, list) and not lost:
            lost.append(answer)
            raise broken(connection)
        return answer

    monkeypatch.setattr(Connection, "read_response", losing)
    trained = [fragile.runs_once() for _ in range(3)]
    ((read_of_stream,),) = (answer.values() for answer in lost[0])
    assert len(read_of_stream) == 8, "the entries of both sessions"
    assert trained.count(True) == 1
    assert fragile.trained() == [["a-0", "a-1"]]
    assert fragile.findings() == ()


def test_an_acknowledgement_whose_reply_was_lost_is_logged_and_repeated(
    fragile: RedisTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis has run the script. The Redis client does not repeat it; the trainer does, and nothing counts
    twice."""
    fragile.agents.group("a", [1.0, 0.0])
    send, read, sent = Connection.send_command, Connection.read_response, list[str]()

    def noting(connection: Connection, *command: Any, **more: Any) -> None:
        sent.append(str(command[1]) if len(command) > 1 else "")
        send(connection, *command, **more)  # type: ignore[no-untyped-call]

    def losing(connection: Connection, *given: Any, **more: Any) -> Any:
        answer: Any = read(connection, *given, **more)
        if sent[-1:] == [ACKNOWLEDGE.sha] and sent.count(ACKNOWLEDGE.sha) == 1:
            raise broken(connection)
        return answer

    fragile.harness.stream.acknowledge([], Verdicts({}, {}))  # so that Redis knows the script
    monkeypatch.setattr(Connection, "send_command", noting)
    monkeypatch.setattr(Connection, "read_response", losing)
    assert fragile.runs_once()
    assert sent.count(ACKNOWLEDGE.sha) == 2
    said = [record.getMessage() for record in caplog.records if "the network broke" in record.getMessage()]
    assert said == ["waiting for the stream to answer (Redis: the network broke); trying again in 0.01 s"]
    counts: Any = fragile.redis.hgetall(key_names.VERDICTS)
    assert counts == {b"session:trained": b"2", b"turn:trained": b"4"}
    assert fragile.trained() == [["a-0", "a-1"]]
    assert not fragile.runs_once()
    assert fragile.findings() == ()


# Imported sessions are trained as those that agents have just ended

READY = Verdict(code="ready", detail="waits for a step of the trainer")


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


def imported_rows(redis: Redis, rows: list[ExportRow], path: Path, prefix: str = "") -> ImportReport:
    path.write_bytes(b"".join(row_to_json(row) + b"\n" for row in rows))
    return import_files(redis, [path], prefix, True, print)


def head_of(redis: Redis, session_id: str) -> SessionHead:
    fields: Any = redis.hgetall(key_names.session(session_id))
    head = read_head(fields)
    assert head is not None
    return head


def test_imported_sessions_are_trained_and_say_so(system: RedisTrainer, tmp_path: Path) -> None:
    rows, path = rows_of_a_group("g", [0.0, 1.0]), tmp_path / "export"
    imported_rows(system.redis, rows, path)
    assert system.runs_once()
    for name in ("g-0", "g-1"):
        verdict = head_of(system.redis, name).verdict
        assert verdict is not None
        assert (verdict.code, verdict.step, verdict.version) == ("trained", 1, 1)
    again = imported_rows(system.redis, rows, path)
    assert (again.sessions, again.existing) == (0, 2)
    assert not system.runs_once()
    assert imported_rows(system.redis, rows, path, "again-").sessions == 2
    assert system.runs_once()
    assert head_of(system.redis, "again-g-1").verdict == Verdict(code="trained", step=2, version=2)


def test_a_trainer_that_reads_meanwhile_waits_for_the_rest_of_an_old_group(
    system: RedisTrainer, tmp_path: Path
) -> None:
    rows, path = rows_of_a_group("g", [0.0, 1.0, 1.0]), tmp_path / "export"
    system.start(group_wait_s=3600.0)
    imported_rows(system.redis, rows[:2], path)
    for _ in range(2):  # then nothing is left to read, and the records are a year old
        assert not system.runs_once()
    imported_rows(system.redis, rows[2:], path)
    assert system.runs_once()
    assert all(head_of(system.redis, f"g-{number}").verdict is not None for number in range(3))
    ended = head_of(system.redis, "g-0").outcome
    assert ended is not None
    assert ended.created_at == 103.0 < time.time()  # only the stream's entry id is new


async def test_a_trainer_by_commands_ends_the_sessions_of_agents_untrained_and_empties_the_stream(
    redis: Redis, redis_url: str
) -> None:
    client = async_redis_at(redis_url)
    writer, reader = StreamWriter(client), claimed_reader(redis)
    verdict = Verdict(code="failed", detail="its own")
    for name, own in (("a", None), ("b", verdict), ("c", None)):
        await writer.open_session(SessionSpec(session_id=name, created_at=time.time()))
        await writer.append_turn(agents_turn(f"t-{name}", name), time.time() + 60)
        if name != "c":
            outcome = Outcome(session_id=name, status="completed", created_at=time.time())
            await writer.append_outcome(outcome, None, own)
    assert len(reader.read(2, 0)) == 2, "a process that died had read two"
    UntrainedTurns(reader, Heartbeat(reader, SharedState(), 0.1)).settle()
    assert redis.xlen(key_names.STREAM) <= 1, "the last delivered entry stays"
    pending: Any = redis.xpending(key_names.STREAM, key_names.GROUP)
    assert pending["pending"] == 0
    heads = {name: await writer.load(name) for name in "abc"}
    verdicts = {name: head and head.verdict for name, head in heads.items()}
    assert verdicts == {"a": NOT_BY_TURNS, "b": verdict, "c": None}
    for name, head in heads.items():
        assert head is not None
        assert head.turn_verdicts == {f"t-{name}": NOT_BY_TURNS}
    await writer.close()
    await client.aclose()
