"""A gateway, rollout servers with engine doubles, and the traffic to them."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx

from gateway.app import create_app
from rollout_queue.contract.published_policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.rollout_server.in_process import ServerThread
from tests.support.rollout_server.processes import ServerClient
from tests.support.rollout_server.weights import float32_tensors, publish, published_copy, write_safetensors
from tests.support.serving import Served
from tests.support.threads import meanwhile
from tests.support.waiting import wait_until
from weir.audit.audit_facts import ClientAnswer

CALLS_PER_S = 30.0


@dataclass
class Fleet:
    """Rollout servers of one gateway, and the policies that may be published."""

    gateway: RunningGateway
    directory: Path
    redis_url: str
    servers: Sequence[ServerClient] = field(default_factory=list)
    sampled: dict[int, float] = field(default_factory=dict)
    """The log-probability that each version gives every token, as far as it was asked for."""

    def write(self, version: int) -> Path:
        """Write the files of a version."""
        policy = self.directory / "policies" / f"v{version:08d}"
        if not policy.exists():
            published_copy(self.directory / "model", policy, version)
            write_safetensors(policy / "model.safetensors", float32_tensors(1.0 + version))
            publish(policy, version)
        return policy

    def write_adapter(self, version: int, name: str = "") -> Path:
        """Write a version that is an adapter of the embedding, which has 4 rows and 2 columns."""
        policy = self.directory / "policies" / f"{name}v{version}"
        policy.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["embed_tokens"]}
        (policy / ADAPTER_CONFIG).write_text(json.dumps(config))
        layer = "base_model.model.model.embed_tokens"
        shapes = {f"{layer}.lora_A.weight": [1, 2], f"{layer}.lora_B.weight": [4, 1]}
        write_safetensors(policy / ADAPTER_WEIGHTS, float32_tensors(float(version), shapes))
        publish(policy, version)
        return policy

    def announce(self, version: int, location: str | None = None) -> Any:
        """Publish a version, and do not wait for servers."""
        body = {"version": version, "location": location or self.write(version).as_uri()}
        reply = self.gateway.post("/admin/policies?wait=false", body, key=ADMIN_KEY)
        assert reply.status_code in (200, 202), reply.text
        return reply.json()

    def plan(self) -> Any:
        return self.gateway.get("/admin/policies/serving", key=ADMIN_KEY).json()

    def results(self, version: int) -> dict[str, Any]:
        detail = self.gateway.get(f"/admin/policies/{version}", key=ADMIN_KEY).json()
        return {result["server"]: result for result in detail["results"]}

    def gateway_versions(self) -> list[int]:
        """What the gateway thinks that each server serves."""
        return [*self.gateway.server_versions().values()]

    def until(self, state: str) -> Any:
        """Wait until the last push is in this state; return it."""
        wait_until(lambda: self.plan()["push"]["state"] == state)
        return self.plan()["push"]

    def versions(self) -> list[int]:
        """What each server says that it serves."""
        return [server.status()["version"] for server in self.servers]


@dataclass
class Deployment(Fleet):
    """All of it in this process."""

    servers: list[ServerThread] = field(default_factory=list)


@dataclass
class Traffic:
    """Calls at an even pace, each in a session of its own."""

    gateway: RunningGateway
    statuses: list[int] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    heard: list[ClientAnswer] = field(default_factory=list)
    """What the clients were told is stored."""
    read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The turns of each session that was read. No more follow, because a session has one call."""

    def turns(self) -> Iterator[dict[str, Any]]:
        """The turns of the sessions whose answers the clients have."""
        for answer in list(self.heard):
            if answer.session_id not in self.read:
                self.read[answer.session_id] = self.gateway.turns({"session_id": answer.session_id})
            yield from self.read[answer.session_id]

    def engines(self) -> Counter[str]:
        """How many calls each server answered."""
        return Counter(turn["engine"] for turn in self.turns())

    def versions(self) -> set[int]:
        return {span["version"] for turn in self.turns() for span in turn["versions"]}


@contextmanager
def traffic(
    *gateways: RunningGateway, per_s: float = CALLS_PER_S, name: str = "call", at_once: int = 64
) -> Iterator[Traffic]:
    """Send calls while the block runs, to the gateways in turn; wait for their answers at its end. A client
    whose connection breaks tries the next gateway, as behind a load balancer."""
    seen, over = Traffic(gateways[0]), Event()

    def call(number: int, session: str, http: httpx.Client) -> int:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {CLIENT_KEY}"}
        for attempt in range(len(gateways)):
            gateway = gateways[(number + attempt) % len(gateways)]
            url = f"{gateway.url}/sessions/{session}/v1/chat/completions"
            with suppress(httpx.TransportError):
                reply = http.post(url, json=body, headers=headers)
                if reply.status_code == 200:
                    seen.heard.append(ClientAnswer(session, reply.headers["x-weir-turn-id"]))
                return reply.status_code
            headers["x-stainless-retry-count"] = str(attempt + 1)
        return 0

    def send() -> None:
        with httpx.Client(timeout=300) as http, ThreadPoolExecutor(at_once) as pool:
            sent: list[Future[int]] = []
            began_at = time.monotonic()
            while not over.is_set():
                seen.sessions.append(f"{name}-{len(sent)}")
                sent.append(pool.submit(call, len(sent), seen.sessions[-1], http))
                over.wait(max(0.0, began_at + len(sent) / per_s - time.monotonic()))
            seen.statuses.extend(each.result() for each in sent)

    with meanwhile(over, send):
        yield seen


def ready(gateway: RunningGateway) -> int:
    page = gateway.get("/admin/rollout_servers", key=ADMIN_KEY).json()
    return sum(server["state"] == "ready" for server in page["data"])


Deploy = Callable[..., Deployment]


@contextmanager
def gateway_thread(
    own_backends: Backends, port: int | None = None, **more: Any
) -> Iterator[tuple[Served, RunningGateway]]:
    """A gateway without bare engines, which a test may treat as a process."""
    settings: dict[str, Any] = {"engines": [], "push_lease_s": 1, "poll_every_s": 0.2, "engine_wait_s": 5.0}
    served = Served(create_app(own_backends.settings(**settings | more)), port)
    try:
        with httpx.Client(timeout=120) as http:
            yield served, RunningGateway(served.url, own_backends.engine, own_backends.redis, http)
    finally:
        served.resume()
        served.end()
        served.join()


def live(gateway: RunningGateway) -> bool:
    try:
        return bool(gateway.get("/live").status_code == 200)
    except httpx.TransportError:
        return False
