"""Routes count the values of a JSON body before they decode it, at every service that clients call."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, FiniteFloat

from fine_tuning.app import create_app as fine_tuning_app
from fine_tuning.settings import FineTuningSettings
from gateway.page import routes
from gateway.rest import agent_routes, deployment, listing, rewards, sessions
from gateway.tinker import tinker_routes
from reward_service.app import create_app as reward_app
from reward_service.settings import RewardSettings
from rollout_queue.http.errors import install_error_handlers
from rollout_queue.http.json_routes import JsonRoute

MANY = JsonRoute.most_values
MODULES = (agent_routes, sessions, listing, rewards, deployment, tinker_routes, routes)


class Body(BaseModel):
    value: FiniteFloat
    more: Any = None


@pytest.fixture
def client() -> httpx.AsyncClient:
    app, router = FastAPI(), APIRouter(route_class=JsonRoute)

    @router.post("/here")
    async def take(body: Body) -> str:
        return json.dumps(body.more)

    app.include_router(router)
    install_error_handlers(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


SAID = {
    b"": (400, None, None),
    b"{": (400, None, None),
    b"null": (400, None, None),
    b'{"value": NaN}': (400, "value", None),
    b'{"value": 1, "more": "\\ud800"}': (200, None, None),
    b'{"value": 1, "more": %s}' % (b"[" + b"1," * (MANY - 3) + b"1]"): (200, None, None),
    b'{"value": 1, "more": %s}' % (b"[" + b"1," * (MANY + 3) + b"1]"): (400, None, "too_many_values"),
    b'{"value": 1, "more": "%s"}' % (b"x" * 2**20): (200, None, None),
    b'{"value": 1, "more": "%s"' % (b"x" * 2**20): (400, None, None),
    b'{"value": 1, "more": "%s"}' % (b"\\n" * 2**20): (400, None, "too_many_values"),
}


@pytest.mark.parametrize("body", SAID, ids=lambda body: repr(body[:40]))
async def test_a_body_is_read_as_ever_unless_it_has_too_many_values(
    client: httpx.AsyncClient, body: bytes
) -> None:
    status, param, code = SAID[body]
    reply = await client.post("/here", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status
    if status == 400:
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert param in (None, error["param"])


def test_every_route_that_takes_a_body_counts_its_values(tmp_path: Path) -> None:
    routers: list[Any] = [module.router for module in MODULES]
    routers.append(reward_app(RewardSettings(gateway_url="http://here")))
    routers.append(fine_tuning_app(FineTuningSettings(directory=tmp_path, gateway_url="http://here")))
    found: list[APIRoute] = []
    while routers:
        for route in routers.pop().routes:
            if isinstance(route, APIRoute):
                found.append(route)
            elif (included := getattr(route, "original_router", None)) is not None:
                routers.append(included)
    bodies = [each for each in found if each.body_field]
    assert len(bodies) > 30
    assert [each.path for each in bodies if not isinstance(each, JsonRoute)] == []
