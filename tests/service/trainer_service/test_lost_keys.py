"""Redis loses each of Weir's keys in turn, while a gateway, agents and a trainer work.

docs/redis.md says what each loss does: the first word after an item's keys is what is tested here.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from tokenizers import Tokenizer

from gateway.operators.lost_keys import LostKeys
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.session_retention import RedisForgetter
from rollout_queue.redis.settings import RedisSettings
from rollout_queue.redis.stream_reader import StreamReader
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.queue.memory_stream import MemoryStream
from tests.support.redis_clients import async_redis_at, redis_at
from tests.support.redis_process import RedisProcess
from tests.support.serving import NOBODY, serving
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.waiting import wait_until
from trainer_service.__main__ import connect
from weir.audit.audit import Report, audit
from weir.audit.audit_sources import Sources
from weir.doctor.redis_health import read_redis

DOCS = Path(__file__).parents[3] / "docs" / "redis.md"
FIXED = {name: each for name, each in vars(key_names).items() if isinstance(each, key_names.Key)}
NAMED = {
    name: call("…", *["…"] * (len(inspect.signature(call).parameters) - 1))
    for name, call in inspect.getmembers(key_names, inspect.isfunction)
    if isinstance(made := inspect.signature(call).return_annotation, type) and issubclass(made, key_names.Key)
}
"""The keys that have something in their names, with … in its place."""


Run = Callable[[str], Iterator["System"]]


def told() -> dict[str, str]:
    """What docs/redis.md says of each key: heals, named or starts anew."""
    table = DOCS.read_text(encoding="utf-8").partition("## When keys are lost")[2].partition("\n## ")[0]
    rows = re.findall(r"^- (`weir:[^*]*?): (heals|named|starts\s+anew): ", table, re.M)
    pairs = [(re.findall(r"`(weir:[^`]*)`", named), " ".join(kind.split())) for named, kind in rows]
    return {key: kind for keys, kind in pairs for key in keys}


@dataclass
class System:
    """A gateway, a trainer that steps when it is told to, and agents."""

    gateway: RunningGateway
    redis: Redis
    """A client that moves nothing."""
    url: str
    lease: Lease
    harness: Harness
    polls: list[None]
    """One for each time that the gateway has looked for what is lost."""
    groups: int = 0
    statuses: list[int] = field(default_factory=list)

    def call(self, session: dict[str, Any]) -> None:
        reply = self.gateway.chat(session=session, key=session["api_key"])
        self.statuses.append(reply.status_code)

    def opened(self, group: str) -> dict[str, Any]:
        """A session after its first call."""
        self.gateway.engine.version = str(self.harness.trainer.version)
        session = self.gateway.session(group_id=group, group_size=2, user="u")
        self.call(session)
        return session

    def group(self, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
        """A group; `meanwhile`, one member has ended and the trainer has read it, and the other one has made
        its first call. Returns the ids of the sessions."""
        self.groups += 1
        first, second = (self.opened(f"g{self.groups}") for _ in range(2))
        self.gateway.finish(first, reward=0.0)
        self.looks()
        meanwhile()
        self.call(second)
        self.gateway.finish(second, reward=1.0)
        return [first["session_id"], second["session_id"]]

    def looks(self) -> bool:
        """The trainer looks once, and its lease is renewed. Returns whether it makes a step."""
        self.lease.renew()
        return self.harness.trainer.run_once()

    def trains(self, sessions: list[str]) -> bool:
        """Whether a step trains these sessions, and nothing is trained twice."""
        for _ in range(10):
            if self.looks():
                break
        rows = self.harness.ledger
        turns = [turn for row in rows for turn in row.turns]
        return len(turns) == len(set(turns)) and set(sessions) <= set(rows[-1].sessions)

    def said(self) -> str:
        return " ".join(self.gateway.admin("GET", "/status").raise_for_status().json()["warnings"])

    def audit(self) -> Report:
        sources = Sources(self.url, NOBODY, checkpoint_dir=self.harness.settings.checkpoint_dir)
        return audit(sources, readings=1)

    def waits_for_polls(self) -> None:
        """Return when the gateway has looked twice more for what is lost."""
        until = len(self.polls) + 2
        wait_until(lambda: len(self.polls) >= until)


@pytest.fixture
def run(
    tiny_model: Path, tokenizer: Tokenizer, make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> Run:
    polls, own = list[None](), list[LostKeys]()
    make, refresh = LostKeys.__init__, LostKeys.refresh

    def made(lost_keys: LostKeys, *arguments: Any) -> None:
        make(lost_keys, *arguments)
        own.append(lost_keys)

    async def counted(lost_keys: LostKeys) -> None:
        try:
            await refresh(lost_keys)
        finally:
            if lost_keys in own:  # not one of a gateway that earlier tests share
                polls.append(None)

    monkeypatch.setattr(LostKeys, "__init__", made)
    monkeypatch.setattr(LostKeys, "refresh", counted)

    def run(url: str) -> Iterator[System]:
        plain = redis_at(url)
        plain.flushdb()
        backends = Backends(url, tiny_model, tokenizer, plain, FakeEngine(tokenizer))
        redis = connect(RedisSettings(redis_url=url))
        with serving(backends) as backends.engine_url:
            engines = [backends.engine_url, backends.engine_url]
            limits = {"open_sessions": 1000, "open_sessions_per_key": 1000, "staleness_versions": 1e6}
            with backends.ready_gateway(engines=engines, limits=limits) as gateway:
                lease = Lease(redis, 30.0)
                assert lease.claim() is None
                stream = cast(MemoryStream, StreamReader(redis, lease.token))
                harness = make_harness("run", stream=stream, model_path=tiny_model).start()
                yield System(gateway, plain, url, lease, harness, polls)
        redis.close()
        plain.close()

    return run


@pytest.fixture
def system(redis_url: str, run: Run) -> Iterator[System]:
    """On a database of the shared Redis that no gateway of another test uses."""
    yield from run(redis_url.removesuffix("0") + "5")


def fill(system: System) -> dict[str, str]:
    """Have most keys. Returns an API key that an admin has made."""
    gateway = system.gateway
    for _ in range(2):
        assert system.trains(system.group())
    made: dict[str, str] = gateway.admin("POST", "/keys", {"name": "made", "token_budget": 10_000}).json()
    assert gateway.chat(key=made["api_key"]).status_code == 200
    gone = gateway.session()
    assert gateway.call("DELETE", f"/sessions/{gone['session_id']}").status_code == 200
    assert gateway.call("DELETE", "/admin/users/nobody/data", key="admin-key").status_code == 200
    assert gateway.admin("POST", "/rollout_servers/engine-1/drain").status_code == 200
    system.redis.hset(key_names.POLICIES, "0", '{"version":0,"created_at":1,"state":"serving"}')

    async def forget() -> None:
        async with async_redis_at(system.url) as redis:
            assert (await RedisForgetter(redis).forget(0.0, 1)).verdicts

    asyncio.run(forget())
    system.waits_for_polls()
    return made


def remove(redis: Redis, key: key_names.Key) -> None:
    redis.delete(key)


def overwrite(redis: Redis, key: key_names.Key) -> None:
    """Another program writes a value of another type."""
    with redis.pipeline(transaction=True) as writing:
        writing.delete(key)
        if key.kind == "string":
            writing.rpush(key, "theirs")
        else:
            writing.set(key, "theirs")
        writing.execute()


def test_the_documents_say_of_each_key_what_its_loss_does() -> None:
    assert {*FIXED.values(), *NAMED.values()} == {key_names.Key(each) for each in told()} | {
        key_names.group_members("…")  # one row says what becomes of a group
    }


@pytest.mark.parametrize("lose", [remove, overwrite])
def test_each_key_may_be_lost_while_agents_and_a_trainer_work(
    system: System, lose: Callable[[Redis, key_names.Key], None]
) -> None:
    """Agents get answers, the trainer trains each group once, and what is not healed is named."""
    made = fill(system)
    kinds, unexplained = told(), dict[str, Any]()
    for name, key in FIXED.items():
        before, existed = {each.identity for each in system.audit().findings}, system.redis.exists(key)
        system.redis.delete(key_names.LOSSES)

        def loses(key: key_names.Key = key) -> None:
            lose(system.redis, key)
            system.redis.script_flush()
            system.waits_for_polls()

        sessions = system.group(loses)
        assert system.trains(sessions), name
        assert set(system.statuses) == {200}, name
        report, said = system.audit(), system.said()
        found = [each for each in report.findings if each.identity not in before]
        if kinds[key] == "heals" and found:
            unexplained[name] = [each.sentence for each in found]
        if kinds[key] == "named" and existed and not found and str(key) not in said + str(report.notes):
            unexplained[name] = "nothing names it"
    assert unexplained == {}
    assert system.gateway.chat(key=made["api_key"]).status_code == 200
    assert system.redis.smembers(key_names.HELD) == {b"", b"engine-1"}
    lose(system.redis, key_names.SECRET)
    system.waits_for_polls()
    assert asyncio.run(read_redis(system.url, 30.0)).losses, "the doctor says the same"


@pytest.mark.parametrize("lose", [remove, overwrite])
def test_each_key_of_a_session_may_be_lost_and_the_others_go_on(
    system: System, lose: Callable[[Redis, key_names.Key], None]
) -> None:
    types = {
        "hash": key_names.Hash,
        "set": key_names.Set,
        "string": key_names.String,
        "zset": key_names.SortedSet,
    }
    fixed = {str(each) for each in FIXED.values()}
    lost: set[str] = set()
    for _ in range(20):
        session = system.opened(f"lone{len(lost)}")
        name = session["session_id"]
        there = {each.decode() for each in system.redis.scan_iter() if each.decode() not in fixed}
        patterns = {re.sub(r"^(weir:\w+):.*?(:members)?$", r"\1\2", each): each for each in sorted(there)}
        left = [pattern for pattern in patterns if pattern not in lost]
        if not left:
            break
        pattern = next((each for each in left if name in patterns[each]), left[0])
        lost.add(pattern)
        key = patterns[pattern]
        lose(system.redis, types[system.redis.type(key).decode()](key))  # type: ignore[union-attr]
        reply = system.gateway.chat(session=session, key=session["api_key"])
        assert reply.status_code in (200, 404), (pattern, reply.text)
        finish = system.gateway.post(f"/sessions/{name}/finish", {"status": "completed", "reward": 1.0})
        assert finish.status_code in (200, 404), (pattern, finish.text)
        assert system.trains(system.group()), pattern
    assert {"weir:s", "weir:g", "weir:g:members", "weir:u", "weir:c", "weir:open"} <= lost


def test_what_waits_in_a_group_that_was_destroyed_is_trained(system: System) -> None:
    assert system.trains(system.group())
    assert system.trains(system.group(lambda: system.redis.xgroup_destroy(key_names.STREAM, key_names.GROUP)))
    assert system.said().count("the consumer group 'trainer' of weir:stream was gone") == 1
    assert system.audit().findings == ()


def test_agents_and_the_trainer_go_on_when_everything_is_lost(system: System) -> None:
    """Sessions in flight are gone; the trainer trains what it has read whole, and goes on."""
    made = fill(system)
    first, second = (system.opened("in-flight") for _ in range(2))
    read = system.group()
    system.looks()
    steps = len(system.harness.ledger)
    system.redis.flushdb()
    system.waits_for_polls()
    assert system.gateway.chat(session=second, key=second["api_key"]).status_code == 404
    assert system.gateway.chat(key=made["api_key"]).status_code == 200
    del first
    for _ in range(2):
        assert system.trains(system.group())
    rows = system.harness.ledger
    assert [row.version for row in rows] == sorted({row.version for row in rows})
    assert len(rows) >= steps + 2
    assert set(system.statuses) == {200}
    assert "Redis has lost its data and came back empty" in system.said()
    assert {each.rule for each in system.audit().findings} == {"redis_emptied"}
    assert system.redis.smembers(key_names.HELD) == {b"", b"engine-1"}
    del read


def test_what_an_older_state_has_is_not_trained_again(run: Run, tmp_path: Path) -> None:
    """Redis starts again with a file from before two steps; the trainer and the gateway go on."""
    with (
        closing(RedisProcess(tmp_path / "redis").start()) as server,
        contextmanager(run)(server.url) as system,
    ):
        waiting = system.group()
        kept = server.written
        assert system.trains(waiting)
        assert system.trains(system.group())
        server.kill()
        server.cut(kept)
        server.start()
        system.waits_for_polls()
        assert system.trains(system.group())
        for _ in range(5):
            assert not system.looks()
        turns = [turn for row in system.harness.ledger for turn in row.turns]
        assert len(turns) == len(set(turns)) == 9
        assert "Redis came back with an older state" in system.said()
        verdicts = {each: system.redis.hget(key_names.session(each), "verdict") for each in waiting}
        assert all(b'"trained"' in verdict for verdict in verdicts.values())  # type: ignore[operator]
