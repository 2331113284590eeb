"""Each service refuses whom it does not serve before it reads a byte of a body: without keys other web sites,
with keys whoever shows none."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from fine_tuning.app import create_app as fine_tuning_app
from fine_tuning.settings import FineTuningSettings
from gateway.app import create_app as gateway_app
from gateway.settings import GatewaySettings
from reward_service.app import create_app as rewards_app
from reward_service.python_sandbox import PythonSettings
from reward_service.settings import RewardSettings
from rollout_queue.http.callers import Keyring
from tests.support.redis_clients import redis_at
from tests.support.reward_service.graders import CHECK, MULTI, PYTHON, SIMILAR
from tests.support.rollout_server.harness import make_harness
from trainer_service.app import create_app as trainer_app
from trainer_service.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore

KEY = "admin-key"
PUBLIC = "https://weir.example:8443"
HUGE = 600 * 2**20
PIECE = bytes(2**16)
MANY: Any = {"per_address": 10**6, "in_all": 10**6}
PROBES = ("/live", "/ready")
READ_BY_ALL = {
    *PROBES,
    "/health",
    "/api/v1/healthz",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/docs/style.css",
    "/",
}
ALSO_TRIED = [("GET", path) for path in ("/metrics", "/openapi.json", "/docs", "/redoc", "/nowhere")]

HOSTS = (
    *("evil.example", "evil.example:8000", "EVIL.example.", "127.0.0.1.evil.example", "[::1", "[::1]x", ""),
    *(
        "127.0.0.1@evil.example",
        "evil.example@127.0.0.1",
        "127.0.0.1/evil.example",
        "127.0.0.1, evil.example",
    ),
    *(
        "0.0.0.0",
        "10.0.0.7:8000",
        "[::]",
        "weir.example.evil.example",
        "localhost.evil.example",
        "evillocalhost",
    ),
)
OWN_MARKS: tuple[dict[str, str], ...] = ({}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"})
FOREIGN_MARKS: tuple[dict[str, str], ...] = (
    *({"sec-fetch-site": site} for site in ("cross-site", "same-site", "", "same-origin, none")),
    *({"origin": f"http://{host}"} for host in ("evil.example", "127.0.0.1:8001", "weir.example")),
    *({"origin": origin} for origin in ("null", "", "http://[", "file://", "127.0.0.1:8000")),
)
FOREIGN = [
    *({"host": host, **marks} for host, marks in product(HOSTS, OWN_MARKS)),
    *({"host": host, **marks} for host, marks in product(("127.0.0.1:8000", "localhost"), FOREIGN_MARKS)),
]
OWN = [
    *({"host": host} for host in ("127.0.0.1:8000", "localhost:1", "LOCALHOST.", "[::1]:8000")),
    *({"host": host} for host in ("127.8.8.8", "a.localhost", "weir.example", "weir.example:8443")),
    *({"host": "127.0.0.1:8000", "sec-fetch-site": site} for site in ("same-origin", "none")),
    *({"host": "127.0.0.1:8000", "origin": origin} for origin in ("http://127.0.0.1:8000", PUBLIC)),
]
STRANGERS: list[dict[str, str]] = [
    {},
    *({"authorization": f"Bearer {key}"} for key in ("", "wrong", "***", f"{KEY}x", KEY[:-1], KEY.upper())),
    *({"authorization": value} for value in (KEY, f"Basic {KEY}")),
    *({"x-api-key": key} for key in ("", "***", "sess-x.y")),
]
TRIED = 300
"""Requests that each service gets, at least; fewer if there are not so many."""


class HugeBody:
    """A body of 600 MiB, which tells how much of it was read."""

    def __init__(self) -> None:
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.read < HUGE:
            self.read += len(PIECE)
            yield PIECE


class Service:
    """One service, called in the test's own loop."""

    def __init__(self, app: Any, status: str, *, named: bool = True, documented: bool = True) -> None:
        """`status`: a path that operators read. `named`: its settings have a public_url. `documented`: it has
        the page of its interface."""
        self.app, self.status, self.named, self.documented = app, status, named, documented
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://127.0.0.1:8000"
        )

    async def routes(self) -> Sequence[tuple[str, str]]:
        """Each method and path, with a 1 in place of each parameter."""
        if hasattr(self.app, "openapi"):
            document = self.app.openapi()
        else:
            headers = {"authorization": f"Bearer {KEY}"}
            document = (await self.http.get("/openapi.json", headers=headers)).json()
        known = [
            (method.upper(), "/".join("1" if "{" in part else part for part in path.split("/")))
            for path, operations in document["paths"].items()
            for method in operations
        ]
        return known + [each for each in ALSO_TRIED if each not in known]

    async def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, int]:
        """The status, and how many bytes of a huge body were read."""
        body = HugeBody()
        own = {"content-type": "application/json", "content-length": str(HUGE)}
        reply = await self.http.request(method, path, headers=own | headers, content=body)
        return reply.status_code, body.read


def gateway(directory: Path, redis_url: str, keys: list[str]) -> Service:
    with redis_at(redis_url) as redis:
        redis.flushdb()
    model = directory.parent / "tiny"
    settings = GatewaySettings(
        redis_url=redis_url, model_path=model, engines=[], admin_keys=keys, public_url=PUBLIC, wrong_keys=MANY
    )
    return Service(gateway_app(settings), "/admin/status")


def trainer(directory: Path, _: str, keys: list[str]) -> Service:
    store, state = PolicyStore(directory, directory, keep=2), SharedState()
    keyring, registry = Keyring(["client"] if keys else [], keys), CollectorRegistry()
    app = trainer_app(state, lambda *_: [], store, keyring, registry, public_url=PUBLIC)
    return Service(app, "/status", documented=False)


def rollout_server(directory: Path, _: str, keys: list[str]) -> Service:
    return Service(make_harness(directory, admin_keys=keys, public_url=PUBLIC).app, "/status")


def rewards(_: Path, __: str, keys: list[str]) -> Service:
    return Service(rewards_app(RewardSettings(admin_keys=keys)), "/status", named=False)


def fine_tuning(directory: Path, _: str, keys: list[str]) -> Service:
    settings = FineTuningSettings(admin_keys=keys, directory=directory)
    return Service(fine_tuning_app(settings), "/v1/files", named=False)


SERVICES = (gateway, trainer, rollout_server, rewards, fine_tuning)
Make = Callable[[list[str]], Service]


@pytest.fixture(params=SERVICES, ids=lambda each: each.__name__)
def make(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, tiny_model: Path) -> Make:
    (tmp_path / "tiny").symlink_to(tiny_model)
    (tmp_path / "own").mkdir()
    return lambda keys: request.param(tmp_path / "own", f"{redis_url.removesuffix('0')}2", keys)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Service]:
    """The service, with its lifespan if it has a use here: the gateway then knows its keys."""
    if service.status != "/admin/status":
        yield service
        return
    received: asyncio.Queue[Any] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(service.app({"type": "lifespan", "state": {}}, received.get, sent.put))
    received.put_nowait({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    try:
        yield service
    finally:
        received.put_nowait({"type": "lifespan.shutdown"})
        await task


def sampled(
    routes: Sequence[tuple[str, str]], headers: Sequence[dict[str, str]]
) -> Sequence[tuple[tuple[str, str], dict[str, str]]]:
    """Each route at least once, and beside that TRIED of all pairs."""
    tried = list(product(routes, headers))
    random.Random(0).shuffle(tried)
    first = {route: (route, headers[at % len(headers)]) for at, route in enumerate(routes)}
    return [*first.values(), *tried[:TRIED]]


async def test_a_service_without_keys_serves_no_other_web_site(make: Make) -> None:
    async with running(make([])) as service:
        routes = [each for each in await service.routes() if each[1] not in (*PROBES, "/health")]
        for (method, path), headers in sampled(routes, FOREIGN):
            assert await service.answer(method, path, headers) == (403, 0), (method, path, headers)
        for headers in OWN:
            status = (await service.http.get(service.status, headers=headers)).status_code
            unknown = not service.named and "weir.example" in str(headers)
            assert status == (403 if unknown else 200), headers


async def test_a_service_with_keys_reads_no_body_without_a_key(make: Make) -> None:
    async with running(make([KEY])) as service:
        routes = [each for each in await service.routes() if each[1] not in READ_BY_ALL]
        routes += [("POST", path) for path in ("/live", "/metrics", "/docs", "/nowhere")]
        for (method, path), headers in sampled(routes, STRANGERS):
            status, read = await service.answer(method, path, headers)
            assert status in (401, 403, 404), (method, path, headers)
            assert read == 0, (method, path, headers)


async def test_a_service_with_keys_has_any_name(make: Make) -> None:
    """Behind a proxy, and in networks of containers, `Host` is the name of a service."""
    async with running(make([KEY])) as service:
        for host, marks in product(("trainer:8100", "weir.example", "10.0.0.7"), ({}, *FOREIGN_MARKS)):
            headers = {"host": host, "authorization": f"Bearer {KEY}", **marks}
            assert (await service.http.get(service.status, headers=headers)).status_code == 200


@pytest.mark.parametrize("keys", [[], [KEY]], ids=["keyless", "keyed"])
async def test_probes_are_answered_at_the_address_of_a_pod(make: Make, keys: list[str]) -> None:
    async with running(make(keys)) as service:
        known = [path for _, path in await service.routes()]
        for path in (*PROBES, *(["/health"] if "/health" in known else [])):
            for host in ("10.0.0.7:8100", "[fd00::7]:8100", "127.0.0.1"):
                status = (await service.http.get(path, headers={"host": host})).status_code
                assert status in (200, 503), (path, host)


@pytest.mark.parametrize("grader", [PYTHON, MULTI | {"graders": {"equal": PYTHON, "similar": SIMILAR}}])
async def test_without_keys_nobody_brings_a_program(tmp_path: Path, grader: dict[str, Any]) -> None:
    item = {"answer": "x"}
    graders = "/v1/fine_tuning/alpha/graders/run"
    body: dict[str, Any] = {"grader": grader, "model_sample": "x", "item": item}
    for from_clients in (False, True):
        settings = RewardSettings(python=PythonSettings(from_clients=from_clients))
        service = Service(rewards_app(settings), "/status")
        reply = await service.http.post(graders, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (403, "grader.type")
        assert "WEIR_ADMIN_KEYS" in reply.json()["error"]["message"]
        assert (await service.http.post(graders, json=body | {"grader": CHECK})).status_code == 200
    method = {"type": "reinforcement", "reinforcement": {"grader": grader}}
    job = {"model": "policy", "training_file": "file", "method": method}
    reply = await fine_tuning(tmp_path, "", []).http.post("/v1/fine_tuning/jobs", json=job)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (403, "method.reinforcement.grader")


async def test_the_page_of_an_interface_loads_and_runs_nothing_foreign(make: Make) -> None:
    async with running(make([KEY])) as service:
        page = await service.http.get("/docs")
        assert (await service.http.get("/redoc", headers={"x-api-key": KEY})).status_code == 404
        assert page.status_code == (200 if service.documented else 404)
        if not service.documented:
            return
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "<script" not in page.text
        assert "://" not in page.text.partition("<h1>")[0]
        for method, path in await service.routes():
            if (method, path) not in ALSO_TRIED:
                assert method in page.text
        style = await service.http.get("/docs/style.css")
        assert (style.status_code, style.headers["content-type"][:8]) == (200, "text/css")
