"""A gateway on a real port, in front of a fake engine, on a real Redis."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from redis import Redis
from tokenizers import Tokenizer

from gateway.app import create_app
from gateway.settings import GatewaySettings
from rollout_queue.redis import key_names
from rollout_queue.service_log import AccessLog
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.polls import count_polls
from tests.support.redis_clients import redis_at
from tests.support.serving import serving
from tests.support.waiting import wait_until

CLIENT_KEY, OTHER_KEY, ADMIN_KEY = "client-key", "other-key", "admin-key"
POLL_S = 0.2
"""A poll takes 5 to 10 ms of CPU time. With polls every 0.05 s, they took more of it than all tests."""

count_polls()


@dataclass
class RunningGateway:
    """The gateway as its clients see it, and the fake engine behind it."""

    url: str
    engine: FakeEngine
    redis: Redis
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    def call(
        self, method: str, path: str, body: Any = None, key: str | None = CLIENT_KEY, **more: Any
    ) -> Any:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers |= more.pop("headers", {})
        return self.http.request(method, self.url + path, json=body, headers=headers, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        return self.call("POST", path, {} if body is None else body, **more)

    def get(self, path: str, **more: Any) -> Any:
        return self.call("GET", path, **more)

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """A request of an operator; `path` is below `/admin`."""
        return self.call(method, f"/admin{path}", body, key=ADMIN_KEY)

    def chat(
        self,
        text: str = "hi",
        path: str = "/v1/chat/completions",
        session: dict[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """A call, in this session if one is given."""
        path = f"/sessions/{session['session_id']}{path}" if session else path
        fields = {name: more.pop(name) for name in list(more) if name not in ("key", "headers")}
        return self.post(path, {"messages": [{"role": "user", "content": text}], **fields}, **more)

    def session(self, **body: Any) -> dict[str, Any]:
        reply = self.post("/sessions", body)
        assert reply.status_code == 201, reply.text
        opened: dict[str, Any] = reply.json()
        return opened

    def finish(self, session: dict[str, Any], **said: Any) -> dict[str, Any]:
        """End a session, as `completed` unless another status is `said`; returns the reply."""
        reply = self.post(f"/sessions/{session['session_id']}/finish", {"status": "completed"} | said)
        assert reply.status_code == 200, reply.text
        ended: dict[str, Any] = reply.json()
        return ended

    def turns(self, session: dict[str, Any]) -> list[dict[str, Any]]:
        view = self.get(f"/sessions/{session['session_id']}?tokens=true").json()
        found: list[dict[str, Any]] = view["turns"]
        return found

    def turns_of(self, reply: Any) -> list[dict[str, Any]]:
        """The turns of the session that a call was in."""
        assert reply.status_code == 200, reply.text
        return self.turns({"session_id": reply.headers["x-weir-session-id"]})

    def server_versions(self) -> dict[str, int]:
        """What the gateway takes for the version of each rollout server."""
        page = self.get("/admin/rollout_servers", key=ADMIN_KEY).json()
        return {server["id"]: server["version"] for server in page["data"]}

    @property
    def refusals(self) -> dict[str, float]:
        """How many requests limits have refused, by code."""
        shown = self.get("/metrics").text.splitlines()
        rows = [row for row in shown if row.startswith("weir_refusals_total{")]
        return {row.split('"')[1]: float(row.split()[-1]) for row in rows}

    def client(self, session: dict[str, Any]) -> openai.OpenAI:
        return openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)


def emptied(redis: Redis, secret: bytes | None = None) -> None:
    """Empty Redis at once but for the secret: its own, unless one is given."""
    kept: Any = secret or redis.get(key_names.SECRET)
    with redis.pipeline(transaction=True) as emptying:
        emptying.flushdb()
        if kept:
            emptying.set(key_names.SECRET, kept)
        emptying.execute()


@dataclass
class Backends:
    """Servers that several tests share. Each test gets a fresh engine and an empty Redis."""

    redis_url: str
    model_path: Path
    tokenizer: Tokenizer
    redis: Redis
    engine: FakeEngine
    engine_url: str = ""
    pings: int = 0
    """How often the engine has said that its process lives."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.engine.app()(scope, receive, send)
        self.pings += scope.get("path") == "/ping"

    def clear(self, secret: bytes | None) -> None:
        """Empty Redis but keep the secret, which gateways read once, when they start. Without a secret, a
        gateway that still runs would write again what it knows."""
        self.engine = FakeEngine(self.tokenizer)
        emptied(self.redis, secret)

    def secret(self) -> bytes:
        return bytes(self.redis.get(key_names.SECRET) or b"")  # type: ignore[arg-type]

    @contextmanager
    def shared(self, url: str, secret: bytes) -> Iterator[RunningGateway]:
        """A gateway that several tests share, for the next of them."""
        self.clear(secret)
        with httpx.Client(timeout=120) as http:
            gateway = RunningGateway(url, self.engine, self.redis, http)
            wait_until(lambda: gateway.get("/ready").status_code == 200)
            # A test before this one may have bounded Redis' memory: a poll tells that it is over.
            wait_until(lambda: "\nweir_redis_max_bytes 0.0\n" in gateway.get("/metrics", key=ADMIN_KEY).text)
            yield gateway

    def settings(self, **settings: Any) -> GatewaySettings:
        given: dict[str, Any] = {
            "redis_url": self.redis_url,
            "model_path": self.model_path,
            "engines": [self.engine_url],
            "client_keys": [CLIENT_KEY, OTHER_KEY],
            "admin_keys": [ADMIN_KEY],
            "engine_wait_s": 0.5,
            "failover_patience_s": 0.5,
            "poll_every_s": POLL_S,
        }
        return GatewaySettings(**given | settings)

    @contextmanager
    def gateway_url(self, **settings: Any) -> Iterator[str]:
        own = self.settings(**settings)
        app = create_app(own)
        bounds = own.connections if "connections" in settings else None
        with serving(AccessLog(app) if own.access_log else app, bounds=bounds) as url:
            yield url

    @contextmanager
    def gateway(self, **settings: Any) -> Iterator[RunningGateway]:
        """One more gateway for this test, on the same Redis and engine."""
        with self.gateway_url(**settings) as url, httpx.Client(timeout=120) as http:
            yield RunningGateway(url, self.engine, self.redis, http)

    @contextmanager
    def ready_gateway(self, **settings: Any) -> Iterator[RunningGateway]:
        """`gateway`, once it takes calls."""
        with self.gateway(**settings) as gateway:
            wait_until(lambda: gateway.get("/ready").status_code == 200)
            yield gateway


@contextmanager
def backends_in(database: int, redis_url: str, model_path: Path, tokenizer: Tokenizer) -> Iterator[Backends]:
    """Backends that outlive a test: their gateways cannot expire the sessions in other databases."""
    own = redis_url.removesuffix("0") + str(database)
    backends = Backends(own, model_path, tokenizer, redis_at(own), FakeEngine(tokenizer))
    with serving(backends) as backends.engine_url:
        yield backends
    backends.redis.close()
