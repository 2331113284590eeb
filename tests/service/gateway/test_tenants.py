"""What one client key does takes nothing from another: texts, writes, memory, servers, time and names."""

import asyncio
import gc
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.app import create_app
from gateway.callers.identity import Identities
from gateway.fleet.fleet import Fleet
from gateway.language.grammar_cost import steps_of
from gateway.settings import LimitSettings
from rollout_queue.contract.errors import MOST_REWARDS
from rollout_queue.redis import key_names
from tests.support.gateway.gated_engine import ANSWER, GatedEngine, asked, let_on
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.serving import Served
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
TINKER = "/api/v1/create_session"
TINKER_SESSION: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
MONTH_S = 30 * 86400


# Texts


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sessions/here/reward", {"value": 1.0, "source": "x" * 201}, "source"),
        ("/sessions/here/reward", {"value": 1.0, "source": "x" * 20 * 2**20}, "source"),
        ("/sessions/here/reward", {"value": 1.0, "turn_id": "x" * 201}, "turn_id"),
        ("/sessions/here/finish", {"status": "failed", "reason": "x" * 2001}, "reason"),
        ("/sessions", {"ttl_s": MONTH_S + 1}, "ttl_s"),
        ("/groups", {"size": 2, "ttl_s": 1e300}, "ttl_s"),
        ("/sessions", {"metadata": {"a": "x" * 2**14}}, "metadata"),
        (TINKER, TINKER_SESSION | {"tags": ["x" * 1001]}, "tags.0"),
        (TINKER, TINKER_SESSION | {"user_metadata": {"a": "x" * 2**14}}, "user_metadata"),
        *(
            (TINKER, TINKER_SESSION | {f: "x" * 1001}, f)
            for f in ("sdk_version", "project_id", "display_name")
        ),
        ("/api/v1/client/config", {"sdk_version": "x" * 1001}, "sdk_version"),
        ("/api/v1/weights_info", {"tinker_path": "x" * 1001}, "tinker_path"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_texts_and_times_have_bounds(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    gateway.session(session_id="here")
    reply = gateway.post(path, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert len(reply.content) < 1000, "it repeats no text"


def test_what_is_within_the_bounds_is_stored(gateway: RunningGateway) -> None:
    session = gateway.session(ttl_s=MONTH_S, metadata={"a": "x" * 16000})
    path = f"/sessions/{session['session_id']}"
    assert gateway.post(f"{path}/reward", {"value": 1.0, "source": "x" * 200}).status_code == 200
    gateway.finish(session, status="failed", reason="x" * 2000)
    assert gateway.get(path).json()["verdict"]["detail"] == "x" * 2000
    assert gateway.post(TINKER, TINKER_SESSION | {"tags": ["x" * 1000], "project_id": "x"}).status_code == 200


def test_the_reply_to_a_reward_stays_short_and_a_session_takes_so_many(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}"
    given = {"value": 0.5, "source": "s" * 200}
    replies = [gateway.post(f"{path}/reward", given | {"key": f"{n}" * 50}) for n in range(30)]
    assert [reply.json()["reward"] for reply in replies] == [0.5 * (n + 1) for n in range(30)]
    assert replies[-1].json()["rewards"][-1]["key"] == "29" * 50
    assert len(replies[-1].content) < 5000, "however many there are"
    assert len(gateway.get(path).json()["rewards"]) == 30
    gateway.redis.hset(key_names.session(session["session_id"]), "magnitude", f"15 {MOST_REWARDS}")
    reply = gateway.post(f"{path}/reward", {"value": 1.0})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "rewards_limit")
    assert gateway.post(f"{path}/reward", given | {"key": "1" * 50}).status_code == 200, (
        "it is stored already"
    )


# Writes


def test_writes_have_a_rate_for_each_key(backends: Backends, gateway: RunningGateway) -> None:
    with backends.ready_gateway(limits=LimitSettings(requests_per_minute=1, burst_s=240)) as limited:
        here = "/sessions/here"
        limited.session(session_id="here")
        writes: list[tuple[str, str, Any]] = [
            ("POST", "/sessions", {}),
            ("POST", "/groups", {"size": 2}),
            ("POST", f"{here}/reward", {"value": 1.0}),
            ("POST", f"{here}/finish", {"status": "completed"}),
            ("POST", TINKER, TINKER_SESSION),
            ("POST", "/api/v1/create_model", {}),
            ("DELETE", here, None),
        ]
        for method, path, body in writes[:3]:
            assert limited.call(method, path, body).status_code in (200, 201)
        for method, path, body in writes[:-1]:
            reply = limited.call(method, path, body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limited"), path
            assert int(reply.headers["retry-after"]) >= 1
        assert limited.get(here).json()["state"] == "open"
        assert limited.chat(session={"session_id": "here"}).status_code == 200, (
            "calls have a rate of their own"
        )
        for key in (OTHER_KEY, ADMIN_KEY):
            for _ in range(4):
                assert limited.post("/sessions", key=key).status_code == 201, key
        assert limited.post("/sessions", key=ADMIN_KEY).status_code == 201, "operators have no rate"


# Memory for bodies


class HalfSent:
    """Calls of which all but the last byte of the body has been sent."""

    def __init__(self, gateway: RunningGateway, api_keys: list[str], size: int) -> None:
        address, self._lines = urlsplit(gateway.url), ExitStack()
        for key in api_keys:
            line = self._lines.enter_context(
                socket.create_connection((str(address.hostname), int(address.port or 0)))
            )
            head = (
                f"POST {CHAT} HTTP/1.1\r\nhost: weir\r\ncontent-type: application/json\r\n"
                f"authorization: Bearer {key}\r\ncontent-length: {size}\r\n\r\n"
            )
            line.sendall(head.encode() + b" " * (size - 1))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._lines.close()


@pytest.fixture
def bounded(backends: Backends) -> Iterator[RunningGateway]:
    """A gateway in which one key may hold as many bytes as there are for all."""
    backends.clear(None)
    bounds = {"max_bodies_bytes": 1_000_000, "max_bodies_bytes_per_key": 1_000_000}
    with backends.ready_gateway(**bounds) as gateway:
        yield gateway


def test_the_bodies_of_a_keys_sessions_leave_memory_to_others(bounded: RunningGateway) -> None:
    """Whatever number of sessions, and of half-sent bodies, it has."""
    mine, theirs = [bounded.session()["api_key"] for _ in range(3)], bounded.post("/sessions", key=OTHER_KEY)
    body = {"messages": [{"role": "user", "content": "hi" + " " * 20_000}]}
    with HalfSent(bounded, [*mine * 26, CLIENT_KEY, CLIENT_KEY, CLIENT_KEY], 20_000):
        for key in [*mine, CLIENT_KEY]:
            wait_until(lambda key=key: bounded.post(CHAT, body, key=key).status_code == 429)  # type: ignore[misc]
        for key in (OTHER_KEY, theirs.json()["api_key"], ADMIN_KEY):
            for _ in range(3):
                reply = bounded.post(CHAT, body, key=key)
                assert (reply.status_code, reply.json().get("error", {}).get("code")) in (
                    (200, None),
                    (400, "context_length_exceeded"),
                ), reply.text
    wait_until(lambda: bounded.chat(key=mine[0]).status_code == 200)


def test_a_session_key_of_an_earlier_release_opens_its_session(gateway: RunningGateway) -> None:
    session = gateway.session()
    secret = gateway.redis.get(key_names.SECRET)
    assert isinstance(secret, bytes)
    without_mark = Identities(None, secret).session_key(session["session_id"], "")  # type: ignore[arg-type]
    assert without_mark != session["api_key"]
    assert gateway.chat(key=without_mark).status_code == 200
    forged = ".".join([session["api_key"].rpartition(".")[0], without_mark.rpartition(".")[2]])
    for wrong in (forged, without_mark[:-1], session["api_key"].replace(".", "..", 1), "sess-", "sess-x"):
        assert gateway.chat(key=wrong).status_code == 401, wrong


# Servers


@contextmanager
def standing(backends: Backends, **settings: Any) -> Iterator[tuple[Served, RunningGateway, Fleet]]:
    """A gateway whose loop and fleet a test looks at."""
    backends.redis.flushdb()
    app = create_app(backends.settings(**settings))
    served = Served(app)
    try:
        with httpx.Client(timeout=120) as http:
            chat: Any = app.endpoints[CHAT]
            gateway = RunningGateway(served.url, backends.engine, backends.redis, http)
            wait_until(lambda: gateway.get("/ready").status_code == 200)
            yield served, gateway, chat.gateway.fleet
    finally:
        served.end()
        served.join()


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"retried": True}], ids=repr)
def test_a_call_waits_for_one_answer_of_another_key(backends: Backends, more: dict[str, Any]) -> None:
    """The engine takes one call at once, and 20 calls of one key wait for it."""
    backends.engine = engine = GatedEngine(backends.tokenizer, stall_after=3)
    engine.script.extend(list(ANSWER) for _ in range(40))
    headers = {"x-stainless-retry-count": "1"} if more.pop("retried", False) else {}
    with (
        standing(backends, engine_wait_s=600.0, poll_every_s=600.0) as (_, gateway, fleet),
        ThreadPoolExecutor(22) as pool,
    ):
        (server,) = fleet.servers.values()
        server.limit = 1

        def call(key: str, number: int) -> int:
            return int(gateway.chat(f"{key} {number}", key=key, headers=headers, **more).status_code)

        calls = [pool.submit(call, CLIENT_KEY, 0)]
        asked(gateway, 1)
        calls += [pool.submit(call, CLIENT_KEY, number) for number in range(1, 20)]
        wait_until(lambda: len(fleet.queue) == 19)
        calls.append(pool.submit(call, OTHER_KEY, 0))
        wait_until(lambda: len(fleet.queue) == 20)
        let_on(gateway)
        assert {each.result() for each in calls} == {200}
    texts = [backends.tokenizer.decode(request["input_ids"]) for request in engine.requests]
    assert [OTHER_KEY in text for text in texts].index(True) <= 2


# Time on the event loop

MIB = 2**20
TOLD = {"role": "user", "content": "hi"}
HOSTILE: dict[str, bytes] = {
    "lists": b"[],",
    "nested": b"[[[[]]]],",
    "objects": b"{},",
    "messages": b'{"role":"user","content":"x"},',
    "numbers": b"1,",
    "long numbers": b"123456789012345678901234567890,",
    "escapes": b'"\\n\\n\\n\\n\\n\\n\\n\\n",',
    "fields": b'{"a":1,"b":2,"c":3},',
}
"""What a field is full of."""
DOORS: dict[str, tuple[str, bytes]] = {
    CHAT: (CLIENT_KEY, b'{"messages": %s}'),
    "/v1/completions": (CLIENT_KEY, b'{"prompt": %s}'),
    "/v1/responses": (CLIENT_KEY, b'{"input": %s}'),
    "/v1/messages": (CLIENT_KEY, b'{"max_tokens": 3, "messages": %s}'),
    "/v1/messages/count_tokens": (CLIENT_KEY, b'{"messages": %s}'),
    "/inference/v1/generate": (CLIENT_KEY, b'{"token_ids": %s}'),
    "/sessions": (CLIENT_KEY, b'{"metadata": {"a": %s}}'),
    "/groups": (CLIENT_KEY, b'{"size": 2, "metadata": {"a": %s}}'),
    "/sessions/here/reward": (CLIENT_KEY, b'{"value": 1, "source": %s}'),
    "/sessions/here/finish": (CLIENT_KEY, b'{"status": "failed", "reason": %s}'),
    TINKER: (CLIENT_KEY, b'{"user_metadata": {"a": %s}}'),
    "/api/v1/asample": (CLIENT_KEY, b'{"prompt": {"chunks": %s}}'),
    "/api/v1/optim_step": (CLIENT_KEY, b'{"model_id": "x", "seq_id": 1, "adam_params": %s}'),
    "/admin/policies": (ADMIN_KEY, b'{"version": %s}'),
    "/admin/keys": (ADMIN_KEY, b'{"name": %s}'),
}


class LoopTime:
    """The longest time that the loop of an application computed at once, of its thread's time."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def __enter__(self) -> "LoopTime":
        self.longest_s, self._over = 0.0, False
        gc.disable()  # it would look at all that the tests of this process have made
        self._watching = ThreadPoolExecutor(1).submit(lambda: self._served.run(self._watch()))
        return self

    async def _watch(self) -> None:
        before = time.thread_time()
        while not self._over:
            await asyncio.sleep(0.0005)  # between two looks
            now = time.thread_time()
            self.longest_s, before = max(self.longest_s, now - before), now

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._watching.result()
        gc.enable()


@pytest.mark.parametrize("door", DOORS)
def test_no_body_takes_more_than_50_ms_of_the_loop(backends: Backends, door: str) -> None:
    """On a machine that does nothing else; here it may take twice as long. Each body is tried twice."""
    key, sound = DOORS[door]
    with standing(backends) as (served, gateway, _):
        gateway.session(session_id="here")
        for kind, piece in HOSTILE.items():
            for size in (200 * 2**10, 8 * MIB):
                body = sound % (b"[" + piece * (size // len(piece)) + b"1]")
                took = []
                for _ in range(2):
                    with LoopTime(served) as loop:
                        headers = {"content-type": "application/json"}
                        reply = gateway.call("POST", door, key=key, content=body, headers=headers)
                    assert reply.status_code == 400, (kind, size, reply.text[:300])
                    assert reply.json()["error"].keys() >= {"message", "type", "param", "code"}
                    took.append(loop.longest_s)
                assert min(took) < 0.1, (kind, size, took)


COSTLY: dict[str, Any] = {
    "many patterns": {f"f{n}": {"type": "string", "pattern": f"(.?){{90}}{n}"} for n in range(100)},
    "a large pattern": {"f": {"type": "string", "pattern": "(.{0,99}){0,99}"}},
    "many lengths": {f"f{n}": {"type": "string", "maxLength": 10**6 + n} for n in range(600)},
}
"""Properties of small schemas. It takes many milliseconds to count what they cost the engine."""


@pytest.mark.parametrize("kind", COSTLY)
@pytest.mark.parametrize("door", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_the_cost_of_a_grammar_is_counted_beside_the_loop(backends: Backends, door: str, kind: str) -> None:
    """Tried twice: the collector may run on the loop meanwhile."""
    schema = {"type": "object", "properties": COSTLY[kind]}
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": schema}
    asked: dict[str, Any] = {
        CHAT: {"messages": [TOLD], "response_format": {"type": "json_schema", "json_schema": form}},
        "/v1/completions": {"prompt": "hi", "guided_json": schema},
        "/v1/responses": {"input": "hi", "text": {"format": form}},
        "/v1/messages": {"messages": [TOLD], "max_tokens": 9, "output_config": {"format": form}},
    }
    took = []
    with standing(backends) as (served, gateway, _):
        for _ in range(2):
            steps_of.cache_clear()
            with LoopTime(served) as loop:
                reply = gateway.post(door, asked[door])
            assert reply.status_code in (200, 400), reply.text
            assert reply.status_code == 200 or "too complex" in reply.text, reply.text
            took.append(loop.longest_s)
    assert min(took) < 0.05, took


def test_long_texts_take_little_of_the_loop(backends: Backends) -> None:
    with standing(backends) as (served, gateway, _):
        for text in ("x", "\n", '"', "\u00e9", "\U0001f600", "<|im_"):
            with LoopTime(served) as loop:
                reply = gateway.chat(text * (24 * MIB // len(json.dumps(text)) + 2))
            assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
            assert loop.longest_s < 0.1, text


def test_a_hostile_key_delays_no_other(backends: Backends) -> None:
    """While one key does all of this again and again, the other's calls are answered, and computed soon."""
    backends.engine.script.clear()
    lists, marks = b'{"messages": [' + b"[]," * (8 * MIB // 3) + b"1]}", "<|im_" * (8 * MIB // 5)
    headers = {"content-type": "application/json"}
    bounds = {"max_bodies_bytes": 64 * MIB, "max_bodies_bytes_per_key": 64 * MIB}
    with standing(backends, **bounds) as (served, gateway, _), ThreadPoolExecutor(4) as pool:
        mine, over = gateway.session(session_id="mine"), Event()

        def attack(number: int) -> list[int]:
            found: list[int] = []
            with httpx.Client(timeout=120) as http:
                own = RunningGateway(gateway.url, gateway.engine, gateway.redis, http)
                while not over.is_set():
                    attacks: list[Any] = [
                        lambda: own.call("POST", CHAT, content=lists, headers=headers),
                        lambda: own.chat(marks, key=mine["api_key"]),
                        lambda: own.post("/sessions/mine/reward", {"value": 1.0, "source": "x" * 8 * MIB}),
                        lambda: own.post("/groups", {"size": 8, "group_id": f"g{len(found)}"}),
                    ]
                    found.append(attacks[number]().status_code)
            return found

        with HalfSent(gateway, [CLIENT_KEY] * 4, 7 * MIB):
            attacking = [pool.submit(attack, number) for number in range(4)]
            with LoopTime(served) as loop:
                for number in range(30):
                    reply = gateway.chat("hi", key=OTHER_KEY)
                    assert reply.status_code == 200, reply.text
                    made = gateway.post("/groups", {"size": 2, "group_id": f"g{number}"}, key=OTHER_KEY)
                    assert made.status_code == 201, made.text
            over.set()
            statuses = [set(each.result()) for each in attacking]
    assert loop.longest_s < 0.1
    assert statuses[3] == {201}
    assert all(found <= {400, 429} for found in statuses[:3]), statuses


# Names of groups


def test_each_key_has_its_own_groups(gateway: RunningGateway) -> None:
    """One that exists refuses nobody, and nobody is told of it."""
    mine = gateway.post("/groups", {"size": 2, "group_id": "g"})
    theirs = [gateway.post("/groups", {"size": size, "group_id": "g"}, key=OTHER_KEY) for size in (3, 4)]
    assert [reply.status_code for reply in (mine, *theirs)] == [201, 201, 409]
    assert {theirs[0].json()["group_id"], *(s["group_id"] for s in theirs[0].json()["sessions"])} == {"g"}
    assert "g exists" in theirs[1].json()["error"]["message"]
    full = gateway.post("/sessions", {"group_id": "g"}, key=OTHER_KEY)
    assert (full.status_code, full.json()["error"]["message"]) == (409, "group g has its 3 sessions already")
    for key, size in ((CLIENT_KEY, 2), (OTHER_KEY, 3)):
        listed = gateway.get("/sessions?group_id=g", key=key).json()["data"]
        assert ({row["group_id"] for row in listed}, len(listed)) == ({"g"}, size)
        session = f"/sessions/{listed[0]['session_id']}"
        assert gateway.get(session, key=key).json()["group_id"] == "g"
        gateway.post(f"{session}/finish", {"status": "completed", "reward": 1.0}, key=key)
        verdict = gateway.get(session, key=key).json()["verdict"]
        assert verdict["detail"].startswith(f"1 of {size} sessions of group g have ended")
    stored = {row["group_id"] for row in gateway.get("/sessions", key=ADMIN_KEY).json()["data"]}
    assert len(stored) == 2, "to operators and the trainer they are two"


def test_a_session_joins_its_own_keys_group(gateway: RunningGateway) -> None:
    """When it is opened, opened again, and described late."""
    joins = {"group_id": "g", "group_size": 2}
    for key in (CLIENT_KEY, OTHER_KEY):
        assert gateway.post("/sessions", joins | {"session_id": "run"}, key=key).status_code == 201
        assert gateway.post("/sessions", joins | {"session_id": "run"}, key=key).status_code == 200
        assert gateway.chat(headers={"x-session-id": "late"}, key=key).status_code == 200
        described = gateway.post("/sessions", joins | {"session_id": "late"}, key=key)
        assert (described.status_code, described.json()["group_id"]) == (200, "g")
        assert gateway.post("/sessions", joins, key=key).status_code == 409, "it is full"
        assert gateway.get("/sessions/late", key=key).json()["group_id"] == "g"
    assert gateway.redis.hget(key_names.group("g"), "size") == b"2", "the first one's group has the id itself"
