"""A power cut takes the last second of Redis' data and none of the trainer's, which is newer afterwards."""

import json
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any, cast

import pytest
from redis.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError

from rollout_queue.contract.stream import Verdicts
from rollout_queue.memory import MemoryStream
from rollout_queue.redis import keys
from rollout_queue.redis.client.settings import RedisSettings
from rollout_queue.redis.lease.lease import Lease
from rollout_queue.redis.reader import RedisReader
from rollout_queue.redis.scripts.consumer import ACKNOWLEDGE
from tests.support.redis_process import RedisProcess
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.redis_agents import NOBODY, RedisAgents
from trainer_service.__main__ import connect
from weir.audit.audit import audit
from weir.audit.report import Report
from weir.audit.sources import Sources


class RolledBack:
    """A trainer on a Redis whose data file can be cut back to an earlier length."""

    def __init__(self, make_harness: MakeHarness, redis: RedisProcess) -> None:
        self.redis, self.agents = redis, RedisAgents(redis.url)
        url = f"{redis.url}?retry_on_timeout=yes"  # `connect` ignores this option
        self._connection = connect(RedisSettings(redis_url=url))
        self._make_harness = make_harness
        self.harness = self.start()

    def start(self) -> Harness:
        """A new process on the same disk; the one before it is dead."""
        self.redis.client.delete(keys.LEASE)
        lease = Lease(self._connection, 1000.0)
        assert lease.claim() is None
        stream = cast(MemoryStream, RedisReader(self._connection, lease.token))
        self.harness = self._make_harness(stream=stream).start()
        return self.harness

    def back_to(self, written: int) -> None:
        self.redis.kill()
        self.redis.cut(written)
        self.redis.start()

    def close(self) -> None:
        self._connection.close()
        self.redis.close()

    def trained(self) -> list[list[str]]:
        return [sorted(row.sessions) for row in self.harness.checkpoints.ledger(0, 100)]

    def audit(self) -> Report:
        sources = Sources(self.redis.url, NOBODY, checkpoint_dir=self.harness.settings.checkpoint_dir)
        return audit(sources, readings=1)

    def codes(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for key in self.redis.client.scan_iter(keys.session("*")):
            verdict: Any = self.redis.client.hget(key, "verdict")
            found[key.decode().removeprefix(keys.session(""))] = verdict and json.loads(verdict)["code"]
        return found


@pytest.fixture
def system(make_harness: MakeHarness, tmp_path: Path) -> Iterator[RolledBack]:
    redis = RedisProcess(tmp_path / "redis").start()
    redis.client.hset(keys.POLICIES, "0", "{}")
    system = RolledBack(make_harness, redis)
    yield system
    system.close()


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("forgotten", ["the acknowledgement", "the delivery as well"])
def test_sessions_of_a_durable_step_are_not_trained_again(
    system: RolledBack, forgotten: str, restarted: bool
) -> None:
    system.agents.group("a", [1.0, 0.0])
    appended = system.redis.written
    delivered = 0
    acknowledge = system.harness.stream.acknowledge

    def noting(*given: Any) -> None:
        nonlocal delivered
        delivered = system.redis.written
        acknowledge(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system.harness.stream, "acknowledge", noting)
        assert system.harness.trainer.run_once()
    assert system.codes() == {"a-0": "trained", "a-1": "trained"}

    system.back_to(delivered if forgotten == "the acknowledgement" else appended)
    assert system.codes() == {"a-0": None, "a-1": None}
    if restarted:
        system.start()
    for _ in range(3):
        assert not system.harness.trainer.run_once()
    system.agents.group("b", [1.0, 0.0])
    assert system.harness.trainer.run_once()
    assert system.trained() == [["a-0", "a-1"], ["b-0", "b-1"]]
    assert system.codes() == dict.fromkeys(("a-0", "a-1", "b-0", "b-1"), "trained")
    assert system.audit().findings == ()


def test_turns_that_redis_forgot_stay_trained_and_the_audit_names_them(system: RolledBack) -> None:
    """Nothing of the lost turns is trained twice, and the audit does not report that all is well."""
    system.agents.group("a", [1.0, 0.0])
    kept = system.redis.written
    system.agents.group("b", [1.0, 0.0])
    assert system.harness.trainer.run_once()
    assert system.trained() == [["a-0", "a-1", "b-0", "b-1"]]
    system.back_to(kept)
    system.start()
    assert not system.harness.trainer.run_once()
    system.agents.group("c", [1.0, 0.0])
    assert system.harness.trainer.run_once()
    assert system.trained() == [["a-0", "a-1", "b-0", "b-1"], ["c-0", "c-1"]]
    (finding,) = system.audit().findings
    assert (finding.kind, finding.rule, finding.subject) == ("unexplained", "unknown_turns", "step 1")
    named = {f"b-{member}-t{number}" for member in (0, 1) for number in (1, 2)}
    assert named == set(finding.sentence.partition(": ")[2].split(", "))


def test_entries_that_a_broken_connection_lost_on_the_way_are_read_again(
    system: RolledBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has delivered the entries and does not deliver them again as new."""
    system.agents.group("a", [1.0, 0.0])
    read, lost = Connection.read_response, list[Any]()

    def losing(connection: Connection, *given: Any, **more: Any) -> Any:
        answer: Any = read(connection, *given, **more)
        if isinstance(answer, list) and not lost:
            lost.append(answer)
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise RedisConnectionError("the network broke")
        return answer

    monkeypatch.setattr(Connection, "read_response", losing)
    trained = [system.harness.trainer.run_once() for _ in range(3)]
    ((read_of_stream,),) = (answer.values() for answer in lost[0])
    assert len(read_of_stream) == 8, "the entries of both sessions"
    assert trained.count(True) == 1
    assert system.trained() == [["a-0", "a-1"]]
    assert system.audit().findings == ()


def test_an_acknowledgement_whose_reply_was_lost_is_logged_and_repeated(
    system: RolledBack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis has run the script. The Redis client does not repeat it; the trainer does, and nothing counts
    twice."""
    system.agents.group("a", [1.0, 0.0])
    script = sha1(ACKNOWLEDGE.encode()).hexdigest()  # noqa: S324 - Redis names scripts so
    send, read, sent = Connection.send_command, Connection.read_response, list[str]()

    def noting(connection: Connection, *command: Any, **more: Any) -> None:
        sent.append(str(command[1]) if len(command) > 1 else "")
        send(connection, *command, **more)  # type: ignore[no-untyped-call]

    def losing(connection: Connection, *given: Any, **more: Any) -> Any:
        answer: Any = read(connection, *given, **more)
        if sent[-1:] == [script] and sent.count(script) == 1:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise RedisConnectionError("the network broke")
        return answer

    system.harness.stream.acknowledge([], Verdicts({}, {}))  # so that Redis knows the script
    monkeypatch.setattr(Connection, "send_command", noting)
    monkeypatch.setattr(Connection, "read_response", losing)
    assert system.harness.trainer.run_once()
    assert sent.count(script) == 2
    said = [record.getMessage() for record in caplog.records if "the network broke" in record.getMessage()]
    assert said == ["waiting for the stream to answer (Redis: the network broke); trying again in 0.01 s"]
    counts: Any = system.redis.client.hgetall(keys.VERDICTS)
    assert counts == {b"session:trained": b"2", b"turn:trained": b"4"}
    assert system.trained() == [["a-0", "a-1"]]
    assert not system.harness.trainer.run_once()
    assert system.audit().findings == ()
