"""Faults without a kill: a full Redis, graceful ends, late writes, jumping clocks, an absent trainer."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Span, Turn
from rollout_queue.redis import key_names
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.gateway.calls import RETRY, Call
from tests.support.gateway.conversation import answered, path_of, say, trainable
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.gated_engine import asked, let_on
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.redis_clients import async_redis_at
from tests.support.redis_process import RedisProcess
from tests.support.serving import free_port
from tests.support.system.local_system import Clock, LocalSystem, Service, open_local_system
from tests.support.system.real_system import ADMIN_KEY as SYSTEM_ADMIN_KEY
from tests.support.system.real_system import BOOTS_WITHIN_S, ENGINE_PYTHON, System
from tests.support.system.turns import retried, versions_of
from tests.support.waiting import PATIENCE_S, wait_until
from weir.audit.audit import audit
from weir.audit.audit_facts import ClientAnswer
from weir.audit.audit_sources import Sources
from weir.stack.stack import Stack

pytestmark = pytest.mark.long

HOUR_S = 3600.0
HI = [{"role": "user", "content": "hi"}]
LONG = "tell me more about this and that, " * 30


@pytest.fixture
def make_local_system(
    tiny_model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> Iterator[Callable[..., LocalSystem]]:
    with ExitStack() as stack:

        def make(clocked: bool = False) -> LocalSystem:
            clock = Clock(tmp_path / "redis.clock") if clocked else None
            redis = RedisProcess(tmp_path / "redis", **(clock.environment if clock else {})).start()
            stack.callback(redis.close)
            backends = Backends(redis.url, tiny_model, tokenizer, redis.client, FakeEngine(tokenizer))
            return open_local_system(backends, redis, tmp_path, stack)

        yield make


def ended(gateway: RunningGateway, session: dict[str, Any], reward: float) -> httpx.Response:
    body = {"status": "completed", "reward": reward}
    reply: httpx.Response = gateway.post(f"/sessions/{session['session_id']}/finish", body)
    return reply


def verdict_codes(gateway: RunningGateway, sessions: list[dict[str, Any]]) -> list[str | None]:
    views = [gateway.get(f"/sessions/{session['session_id']}").json() for session in sessions]
    return [view["verdict"] and view["verdict"]["code"] for view in views]


# A full Redis


def test_a_redis_that_fills_up_turns_newcomers_away_first_and_the_trainer_empties_it(
    make_local_system: Callable[..., LocalSystem],
) -> None:
    local = make_local_system()
    service, gateway = local.gateway(POLL_EVERY_S="0.05", LIMITS__QUEUE_MEMORY="0.8")
    memory: Any = local.redis.client.info("memory")
    local.redis.client.config_set("maxmemory", memory["used_memory"] + 8_000_000)
    heard: list[ClientAnswer] = []

    def call(session: dict[str, Any]) -> Any:
        reply = gateway.chat(LONG, path=path_of(session))
        if reply.status_code == 200:
            heard.append(ClientAnswer(session["session_id"], reply.headers["x-weir-turn-id"]))
        return reply

    def newcomers() -> Any:
        """Play a new group to its end; return the answer if the gateway refuses it."""
        reply = gateway.post("/groups", {"size": 2})
        if reply.status_code != 201:
            return reply
        for reward, session in enumerate(reply.json()["sessions"]):
            assert call(session).status_code == 200
            assert ended(gateway, session, float(reward)).status_code == 200
            heard.append(ClientAnswer(session["session_id"], reward_key="finish", finished=True))
        return None

    long_one = gateway.session()
    while (refused := newcomers()) is None:
        pass
    memory = local.redis.client.info("memory")
    assert memory["used_memory"] < memory["maxmemory"], "before it is full"
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert "gateway.limits.queue_memory" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    while (full := call(long_one)).status_code == 200:
        pass
    assert (full.status_code, full.json()["error"]["type"]) == (503, "storage_unavailable")
    assert full.headers["retry-after"]
    memory = local.redis.client.info("memory")
    local.redis.client.config_set(
        "maxmemory", memory["used_memory"] - 200_000
    )  # now even the smallest write does not fit
    assert ended(gateway, long_one, 1.0).status_code == 503
    assert local.audit(heard).findings == (), "nothing is missing"

    trainer = local.trainer(service, ALGORITHM__MIN_LIVE_ROWS="4", ALGORITHM__FLUSH_AFTER_S="0.5")
    trainer.until("/ready")
    wait_until(lambda: ended(gateway, long_one, 1.0).status_code == 200, 60)
    wait_until(lambda: gateway.post("/groups", {"size": 2}).status_code == 201, 60)
    steps = {answer.session_id for answer in heard if answer.finished}
    sessions = [{"session_id": session_id} for session_id in sorted(steps)]
    wait_until(lambda: set(verdict_codes(gateway, sessions)) == {"trained"}, 60)
    assert trainer.terminate() == 0
    assert local.audit(heard).findings == ()


# Told to end


def test_a_redis_that_is_told_to_end_under_load_comes_back_with_all_that_was_heard(
    make_local_system: Callable[..., LocalSystem],
) -> None:
    local = make_local_system()
    _, gateway = local.gateway(POLL_EVERY_S="0.05")
    sessions = [gateway.session() for _ in range(8)]
    heard: list[ClientAnswer] = []
    over, refused = Event(), Event()

    def agent(session: dict[str, Any]) -> None:
        history = [{"role": "user", "content": "begin"}]
        headers = {"authorization": f"Bearer {session['api_key']}"}
        with httpx.Client(headers=headers, timeout=120) as http:
            while not over.is_set():
                reply = http.post(gateway.url + path_of(session), json={"messages": history})
                if reply.status_code == 200:
                    heard.append(ClientAnswer(session["session_id"], reply.headers["x-weir-turn-id"]))
                    history = answered(history, reply)[-4:]
                else:
                    assert reply.json()["error"]["type"] == "storage_unavailable", reply.text
                    refused.set()

    with ThreadPoolExecutor(8) as agents:
        running = [agents.submit(agent, session) for session in sessions]
        try:
            wait_until(lambda: len(heard) > 8)
            assert local.redis.terminate() == 0
            assert refused.wait(PATIENCE_S)
            before = len(heard)
            local.redis.start()
            wait_until(lambda: len(heard) > before + 8)  # the gateway goes on by itself
        finally:
            over.set()
        for each in running:
            each.result()
    assert local.audit(heard).findings == ()


@contextmanager
def another_rollout_server(system: System, root: Path) -> Iterator[Service]:
    """A second server with its own engine, in rotation. On SIGTERM it gives its calls no time to end."""
    ours = {
        "ID": "rollout-1",
        "ENGINE_PORT": str(free_port()),
        "ENGINE_PYTHON": str(ENGINE_PYTHON),
        "ENGINE_DEVICE": "cpu",
        "ENGINE_LOG": str(root / "engine.log"),
        "GATEWAY_URL": system.stack.gateway_url,
        "TRAINER_URL": system.stack.trainer_url,
        "POLICIES_DIR": str(system.settings.run_dir / "policies"),
        "WEIGHTS_DIR": str(root / "weights"),
        "MAX_RUNNING_REQUESTS": "16",
        "MAX_TOTAL_TOKENS": "32768",
        "DRAIN_TIMEOUT_S": "0",
        "STOP_TIMEOUT_S": "0.1",
    }
    environment = {f"WEIR_ROLLOUT_SERVER__{name}": value for name, value in ours.items()}
    environment |= {
        "WEIR_MODEL_PATH": str(system.settings.model_path),
        "WEIR_ROLLOUT_SERVER_KEY": str(system.settings.rollout_server_key),
    }
    service = Service("rollout_server", root / "rollout-1.log", environment)
    try:
        wait_until(lambda: states(system).get("rollout-1") == "ready", BOOTS_WITHIN_S)
        yield service
    finally:
        service.close()
        system.request("DELETE", "/admin/rollout_servers/rollout-1", key=SYSTEM_ADMIN_KEY)


def states(system: System) -> dict[str, str]:
    """The state of each rollout server, as the gateway sees it."""
    servers = system.get("/admin/rollout_servers", key=SYSTEM_ADMIN_KEY)["data"]
    return {server["id"]: server["state"] for server in servers}


def calls_in_flight(system: System, server_id: str) -> int:
    servers = system.get("/admin/rollout_servers", key=SYSTEM_ADMIN_KEY)["data"]
    return next(int(server["in_flight"]) for server in servers if server["id"] == server_id)


class Stream:
    """One long streamed answer to a client that does not retry."""

    def __init__(self, system: System, pool: ThreadPoolExecutor, max_tokens: int) -> None:
        self.ticket = system.post("/sessions", {"train": False})
        self.text = ""
        self._system, self._max_tokens = system, max_tokens
        self._over = pool.submit(self._listen)

    def begun(self) -> bool:
        return len(self.text) > 20 or self._over.done()

    def heard(self) -> tuple[dict[str, Any], ClientAnswer]:
        """The turn and the client's answer. Fails on an error, or if the texts of both differ."""
        turn_id = self._over.result(BOOTS_WITHIN_S)
        session_id = self.ticket["session_id"]
        (turn,) = self._system.get(f"/sessions/{session_id}?tokens=true&text=true")["turns"]
        assert turn["output_text"] in (self.text, f"{self.text}<|im_end|>", f"{self.text}<|endoftext|>")
        assert set(versions_of(turn)) <= {0, self._system.serving()}
        return turn, ClientAnswer(session_id, turn_id)

    def _listen(self) -> str:
        with self._system.client(self.ticket) as client:
            call = client.completions.with_raw_response
            raw = call.create(model="policy", prompt="on", max_tokens=self._max_tokens, stream=True)
            finish = None
            for chunk in raw.parse():
                self.text += chunk.choices[0].text if chunk.choices else ""
                finish = chunk.choices[0].finish_reason if chunk.choices else finish
        assert finish in ("stop", "length")
        return raw.headers["x-weir-turn-id"]


def test_rollout_servers_that_are_told_to_end_under_load_leave_no_error_and_no_seam(
    stacked: System, tmp_path: Path
) -> None:
    """One server gives its calls no time to end, and the other continues them. Then the last server is told
    to end: its calls end first, and new calls wait."""
    system, stack = stacked, stacked.stack
    assert isinstance(stack, Stack)

    def streams(number: int, max_tokens: int) -> list[Stream]:
        started = [Stream(system, pool, max_tokens) for _ in range(number)]
        wait_until(lambda: all(stream.begun() for stream in started), 120)
        return started

    def family(root: psutil.Process) -> list[psutil.Process]:
        children: list[psutil.Process] = root.children(recursive=True)
        assert len(children) > 1, "SGLang and its scheduler"
        return children

    with ThreadPoolExecutor(16) as pool:
        with another_rollout_server(system, tmp_path) as second:
            left = family(psutil.Process(second.process.pid))
            calls = streams(12, 2000)
            wait_until(lambda: calls_in_flight(system, "rollout-1") > 0)
            assert second.terminate() == 0
            assert not psutil.wait_procs(left, timeout=300)[1]
            answers = [stream.heard() for stream in calls]
        engines = [{span.get("engine") for span in turn["versions"]} for turn, _ in answers]
        assert {"rollout-0", "rollout-1"} in engines, "no answer began on one server and ended on the other"

        first = stack.processes["rollout_server"]
        left = family(psutil.Process(first.pid))
        calls = streams(4, 200)
        psutil.Process(first.pid).terminate()
        wait_until(lambda: states(system)["rollout-0"] != "ready")
        assert states(system)["rollout-0"] == "draining", "the server has told the gateway that it drains"
        faults = retried(system)
        waiting = [Stream(system, pool, 8) for _ in range(4)]
        wait_until(lambda: first.exit_code is not None, system.settings.stop_timeout_s)
        assert first.exit_code == 0
        assert not psutil.wait_procs(left, timeout=300)[1]
        answers += [stream.heard() for stream in calls]
        assert retried(system) == faults, "the server ended the answers that it had begun"
        assert not any(stream.begun() for stream in waiting)
        stack.restart("rollout_server")
        answers += [stream.heard() for stream in waiting]

    sources = Sources(
        stack.redis_url,
        system.stack.trainer_url,
        SYSTEM_ADMIN_KEY,
        system.settings.run_dir / "checkpoints",
    )
    assert audit(sources, [answer for _, answer in answers]).findings == ()


# A process that sleeps


def test_a_gateway_that_slept_finds_what_happened_meanwhile(
    make_local_system: Callable[..., LocalSystem],
) -> None:
    """Its late writes change no verdict, and nothing is recorded twice."""
    local = make_local_system()
    _, awake = local.gateway(POLL_EVERY_S="0.05")
    slept, asleep = local.gateway(POLL_EVERY_S="0.05")
    awake.engine.stall_after = 3
    retried, finished, undisturbed = awake.session(), awake.session(), awake.session()
    expired = awake.session(ttl_s=1.0)
    calls = [Call(asleep, session) for session in (retried, finished, expired, undisturbed)]
    asked(asleep, 4)
    slept.signal(signal.SIGSTOP)
    awake.engine.stall_after = None
    again = Call(awake, retried, attempt=1).completion()
    more = say(awake, retried, [*HI, again["choices"][0]["message"], *HI]).json()
    other = awake.chat("something else", path=path_of(finished))
    assert ended(awake, finished, 1.0).status_code == 200
    wait_until(lambda: verdict_codes(awake, [expired]) == ["expired"])
    let_on(awake)
    time.sleep(1.0)  # meanwhile the engine ends its answers, which the stopped gateway does not read
    slept.signal(signal.SIGCONT)
    heard = [call.answer() for call in calls]

    assert [status for status, _ in heard][3] == 200
    assert {status for status, _ in heard[1:3]} <= {404, 409, 410}, heard
    assert [turn.completion_id for turn in trainable(awake, retried)] == [again["id"], more["id"]]
    assert [turn.turn_id for turn in trainable(awake, finished)] == [other.headers["x-weir-turn-id"]]
    assert trainable(awake, expired) == []
    assert len(trainable(awake, undisturbed)) == 1
    assert verdict_codes(awake, [retried, finished, expired, undisturbed]) == [
        "open",
        "ready",
        "expired",
        "open",
    ]
    assert local.audit([]).findings == ()


# Clocks


def test_clocks_that_jump_lose_nothing_and_keep_nobody_waiting(
    make_local_system: Callable[..., LocalSystem],
) -> None:
    local = make_local_system(clocked=True)
    redis_clock, clock = local.clock("redis"), local.clock("gateway")
    _, gateway = local.gateway(clock, POLL_EVERY_S="0.05", LIMITS__REQUESTS_PER_MINUTE="60")
    short, long = gateway.session(ttl_s=HOUR_S / 2), gateway.session(ttl_s=3 * HOUR_S)
    history = [{"role": "user", "content": "begin"}]
    history = answered(history, say(gateway, long, history))

    clock.jump(+HOUR_S)  # sessions with less than an hour left expire early
    wait_until(lambda: verdict_codes(gateway, [short, long]) == ["expired", "open"])
    history = answered(history, say(gateway, long, history))
    clock.jump(-HOUR_S)  # by the jumped clock, the next turns end before the turns that they follow
    for _ in range(2):
        history = answered(history, say(gateway, long, history))
    again = gateway.post(path_of(long), {"messages": history[:1]}, headers={RETRY: "1"})
    assert again.status_code == 200
    relations = {turn["turn_id"]: turn["relation"] for turn in gateway.turns(long)}
    assert sorted(relations.values()).count("extends") == 3
    assert ended(gateway, long, 1.0).status_code == 200
    assert len(trainable(gateway, long)) == 5
    assert verdict_codes(gateway, [long]) == ["ready"], "and nothing expires"

    for offset_s in (-HOUR_S, +HOUR_S):  # by Redis' own clock, keys expire and rate limits refill
        redis_clock.jump(offset_s)
        time.sleep(0.3)  # a process needs this time to notice the jump, and there is no event
        reply = gateway.chat("who waits?", path=path_of(gateway.session()))
        assert reply.status_code == 200 or int(reply.headers["retry-after"]) <= 60, reply.headers
    fresh = gateway.session()
    assert gateway.chat("go on", path=path_of(fresh)).status_code == 200
    assert local.audit([]).findings == ()


def test_a_trainers_clock_that_jumps_ends_its_patience_early_or_late_and_nothing_else(
    make_local_system: Callable[..., LocalSystem],
) -> None:
    local = make_local_system()
    clock = local.clock("trainer", often=True)
    service, gateway = local.gateway(POLL_EVERY_S="0.05")
    patience = {"ALGORITHM__GROUP_DEADLINE_S": str(HOUR_S / 2), "ALGORITHM__MIN_LIVE_ROWS": "2"}
    trainer = local.trainer(service, clock, **patience)
    trainer.until("/ready")
    heard: list[ClientAnswer] = []

    def group() -> list[dict[str, Any]]:
        """A group of three: two end with different rewards, the third is still open."""
        sessions: list[dict[str, Any]] = gateway.post("/groups", {"size": 3}).json()["sessions"]
        for session in sessions:
            reply = gateway.chat("begin", path=path_of(session))
            heard.append(ClientAnswer(session["session_id"], reply.headers["x-weir-turn-id"]))
        for reward, session in enumerate(sessions[:2]):
            assert ended(gateway, session, float(reward)).status_code == 200
        return sessions

    def said() -> str:
        return str(trainer.until("/status")["waiting_for"])

    def seen_at() -> float:
        at: Any = local.redis.client.hget(key_names.TRAINER, "last_seen")
        return float(at)

    holder = local.redis.client.get(key_names.LEASE)
    early = group()
    wait_until(lambda: "1 group waits for 1 unfinished member" in said(), 60)
    clock.jump(+HOUR_S)
    wait_until(lambda: verdict_codes(gateway, early) == ["trained", "trained", "open"], 60)
    assert ended(gateway, early[2], 1.0).status_code == 200
    wait_until(lambda: verdict_codes(gateway, early)[2] == "group_incomplete", 60)

    clock.jump(-HOUR_S)
    wait_until(lambda: seen_at() < time.time() - HOUR_S / 2)
    late = group()
    wait_until(lambda: "1 group waits for 1 unfinished member; the oldest has waited 0 s" in said(), 60)
    assert int(said().rpartition(" in ")[2].removesuffix(" s")) > HOUR_S, "the deadline is later by the jump"
    assert verdict_codes(gateway, late) == ["group_incomplete", "group_incomplete", "open"]
    assert local.redis.client.get(key_names.LEASE) == holder
    assert ended(gateway, late[2], 1.0).status_code == 200
    wait_until(lambda: set(verdict_codes(gateway, late)) == {"trained"}, 60)
    assert trainer.terminate() == 0
    assert local.audit(heard).findings == ()


# A trainer that was away


async def an_hour_of_traffic(redis_url: str, groups: int) -> None:
    """Writes groups of two sessions, as gateways do; one member earns 1 and the other 0."""
    connection = async_redis_at(redis_url)
    writer, now = StreamWriter(connection), time.time()

    async def episode(group: int, member: int) -> None:
        session_id, group_id = f"s{group}-{member}", f"g{group}"
        where: dict[str, Any] = {"session_id": session_id, "group_id": group_id, "group_size": 2}
        await writer.open_session(SessionSpec(created_at=now, ttl_s=HOUR_S, **where))
        turn = Turn(
            turn_id=f"{session_id}-t",
            session_id=session_id,
            group_id=group_id,
            context_ids=TokenIds([2, 3, 4]),
            output_ids=TokenIds([10 + member, 20, 1]),
            logprobs=Logprobs([-4.0] * 3),
            versions=(Span(0, 0, 3),),
            finish="stop",
            started_at=now,
            finished_at=now,
        )
        await writer.append_turn(turn, expires_at=now + HOUR_S)
        reward = Reward(session_id=session_id, key="finish", value=float(member), created_at=now)
        await writer.append_outcome(Outcome(status="completed", created_at=now, **where), reward, None)

    for first in range(0, groups, 50):
        pairs = [(group, member) for group in range(first, first + 50) for member in (0, 1)]
        await asyncio.gather(*(episode(*pair) for pair in pairs))
    await writer.close()
    await connection.aclose()


def test_a_trainer_that_was_away_takes_all_that_came_and_ends_well_when_told_in_a_step(
    make_local_system: Callable[..., LocalSystem],
) -> None:
    local = make_local_system()
    service, _ = local.gateway(POLL_EVERY_S="0.5")

    def started() -> Service:
        return local.trainer(service, ALGORITHM__MAX_ROWS="100", ALGORITHM__FLUSH_AFTER_S="1")

    trainer = started()
    trainer.until("/ready")
    idle_rss = psutil.Process(trainer.process.pid).memory_info().rss
    trainer.signal(signal.SIGSTOP)  # the trainer stops until its lease has expired
    asyncio.run(an_hour_of_traffic(local.redis.url, 1000))
    wait_until(lambda: not local.redis.client.exists(key_names.LEASE))
    trainer.signal(signal.SIGCONT)
    wait_until(lambda: int(trainer.until("/status")["step"]) >= 2, 60)
    trainer.until("/status", state="training")
    assert trainer.terminate() == 0
    left: Any = local.redis.client.hgetall(key_names.VERDICTS)
    assert 200 <= int(left[b"session:trained"]) < 2000
    assert local.audit([]).findings == ()

    trainer = started()

    def all_judged() -> bool:
        counts: Any = local.redis.client.hgetall(key_names.VERDICTS)
        return sum(int(count) for name, count in counts.items() if name.startswith(b"session:")) == 2000

    trainer.until("/ready")
    wait_until(all_judged, 60)
    counts: Any = local.redis.client.hgetall(key_names.VERDICTS)
    # Nine steps train 100 rows each, at versions 0 to 8. Then the other rows, which waited, are too old.
    sessions = {name: int(count) for name, count in counts.items() if name.startswith(b"session:")}
    assert sessions == {b"session:trained": 900, b"session:skipped_for_newer": 1100}
    wait_until(lambda: local.redis.client.xlen(key_names.STREAM) <= 1)
    peak_rss = psutil.Process(trainer.process.pid).memory_info().rss
    assert peak_rss - idle_rss < 200 * 2**20
    report = local.audit([], trainer)
    assert report.findings == ()
    assert report.totals.ledger_turns == 900
