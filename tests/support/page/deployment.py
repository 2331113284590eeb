"""A gateway, three rollout servers that are doubles, and a trainer's report, for the page to show."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from tests.support.gateway.fake_engine import FakeEngine, scores_of
from tests.support.gateway.fake_rollout_server import FakeRolloutServer
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.serving import serving
from tests.support.waiting import wait_until

SIZE_BYTES = 1_288_490_188
DONE = (200, 201, 202, 207)
"""207: a push that not every server took."""
ENGINE_PATHS = ("/generate", "/model_info", "/abort_request")
METRICS = {
    "reward_mean": 0.6125,
    "staleness/total_mean": 0.84,
    "staleness/total_max": 2.0,
    "tokens_per_s": 5321.4,
    "rollouts": 64,
    "loss": 0.0123,
}


@dataclass(eq=False)
class ScoringEngine(FakeEngine):
    """Also scores answers, and each version a little differently."""

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if "stream" in body:
            return await super().generate(request)
        meta = scores_of(body)
        for score in meta["input_token_logprobs"]:
            score[0] = score[0] and score[0] * (1 + int(self.version) / 200)
        return JSONResponse({"meta_info": meta})


@dataclass
class ServerWithEngine:
    """A double of a rollout server, and of its engine, at one address."""

    engine: FakeEngine
    part: FakeRolloutServer = field(default_factory=FakeRolloutServer)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.engine.version = str(self.part.version)
        engines = scope["type"] == "http" and scope["path"] in ENGINE_PATHS
        await (self.engine if engines else self.part).app()(scope, receive, send)


@dataclass
class ShownDeployment:
    """What the page shows."""

    gateway: RunningGateway
    servers: dict[str, ServerWithEngine] = field(default_factory=dict)

    def admin(self, method: str, path: str, body: Any = None, status: tuple[int, ...] = DONE) -> Any:
        reply = self.gateway.call(method, path, body, key=ADMIN_KEY)
        assert reply.status_code in status, reply.text
        return reply.json()

    def publish(self, version: int, **more: Any) -> None:
        body = {"version": version, "location": f"file:///srv/weir/policies/v{version:08d}", **more}
        self.admin("POST", "/admin/policies", {"step": 8 * version, "size_bytes": SIZE_BYTES} | body)

    def report(self, **fields: Any) -> None:
        """Let a trainer report."""
        given: dict[str, Any] = {
            "state": "waiting",
            "step": 96,
            "version": 12,
            "waiting_for": "3 more groups: 5 of 8 are complete",
            "last_seen": time.time(),
            "url": "http://127.0.0.1:9",
            "source": "turns",
            "metrics": METRICS,
        }
        self.gateway.redis.hset(key_names.TRAINER, mapping=TrainerReport(**given | fields).fields())  # type: ignore[arg-type]


@contextmanager
def shown_deployment(backends: Backends, servers: int = 3, **settings: Any) -> Iterator[ShownDeployment]:
    """The deployment, with the rollout servers that registered."""
    backends.clear(None)
    with ExitStack() as stack:
        given = {"engines": [], "page": {"every_s": 0.2}} | settings
        shown = ShownDeployment(stack.enter_context(backends.gateway(**given)))
        for number in range(servers):
            double = ServerWithEngine(ScoringEngine(backends.tokenizer))
            shown.servers[f"rollout-{number}"] = double
            url = stack.enter_context(serving(double))
            body = {"id": f"rollout-{number}", "url": url, "engine_url": url}
            shown.admin("POST", "/admin/rollout_servers", body)
        wait_until(lambda: _ready(shown) == servers)
        yield shown


def _ready(shown: ShownDeployment) -> int:
    return sum(each["state"] == "ready" for each in shown.admin("GET", "/admin/rollout_servers")["data"])
