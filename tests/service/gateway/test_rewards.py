"""Rewards that arrive at once, and rewards that an older build stored."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from rollout_queue.contract.codec import encode
from rollout_queue.contract.records import Reward
from rollout_queue.redis import keys
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, RunningGateway

HUGE = 1e308


def at_once(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """POST every body over its own connection, all in parallel."""
    headers = {"authorization": f"Bearer {CLIENT_KEY}"}

    def post(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(url, json=body, headers=headers, timeout=120)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(post, bodies))


def test_parallel_rewards_never_add_up_to_infinity(gateway: RunningGateway) -> None:
    for _ in range(5):
        path = f"/sessions/{gateway.session()['session_id']}"
        replies = at_once(f"{gateway.url}{path}/reward", [{"value": HUGE}] * 8)
        assert sorted(reply.status_code for reply in replies) == [200, *[400] * 7]
        refused = next(reply for reply in replies if reply.status_code == 400)
        assert refused.json()["error"]["param"] == "value"
        assert gateway.get(path).json()["reward"] == HUGE
    assert gateway.get("/sessions").status_code == 200


def test_a_reward_and_a_finish_at_once_do_not_add_up_to_infinity(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    assert gateway.post(f"{path}/reward", {"value": HUGE}).status_code == 200
    refused = gateway.post(f"{path}/finish", {"status": "completed", "reward": HUGE})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reward")
    assert gateway.get(path).json()["state"] == "open"


def test_rewards_are_finite_in_whatever_order_they_are_added(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    turn_id = gateway.chat(path=f"{path}/v1/chat/completions").headers["x-weir-turn-id"]
    assert gateway.post(f"{path}/reward", {"value": HUGE, "turn_id": turn_id}).status_code == 200
    assert gateway.post(f"{path}/reward", {"value": -HUGE}).status_code == 400
    assert gateway.post(f"{path}/reward", {"value": HUGE, "turn_id": turn_id}).status_code == 400
    assert gateway.get(path).json()["turns"][0]["reward"] == HUGE


@pytest.fixture
def infinite(gateway: RunningGateway) -> str:
    """The path of a session in which an older build stored rewards that add up to infinity."""
    session_id = gateway.session()["session_id"]
    for name in "ab":
        reward = Reward(session_id=session_id, value=HUGE, key=name, created_at=1.0)
        gateway.redis.hset(keys.session(session_id), f"r:{name}", encode(reward))
    return f"/sessions/{session_id}"


def test_an_infinite_session_of_an_older_build_is_listed_and_exported(
    gateway: RunningGateway, infinite: str
) -> None:
    for path in (infinite, "/sessions", "/admin/pipeline"):
        assert gateway.get(path, key=ADMIN_KEY).status_code == 200, path
    assert gateway.get(infinite).json()["reward"] > HUGE
    gateway.chat(path=f"{infinite}/v1/chat/completions")
    exported = gateway.get("/admin/export", key=ADMIN_KEY)
    assert msgspec.json.decode(exported.content.splitlines()[0])["session"]["reward"] > HUGE


def test_an_infinite_session_of_an_older_build_takes_no_further_reward(
    gateway: RunningGateway, infinite: str
) -> None:
    assert gateway.post(f"{infinite}/reward", {"value": 1.0}).status_code == 400
    assert gateway.post(f"{infinite}/reward", {"value": HUGE, "key": "a"}).status_code == 200
