"""Rewards that arrive at once, and rewards that an older build stored."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from rollout_queue.contract.codec import encode
from rollout_queue.contract.records import Reward
from rollout_queue.redis import keys
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, RunningGateway

HUGE = 1e308


def at_once(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """POST all bodies at the same time."""
    headers = {"authorization": f"Bearer {CLIENT_KEY}"}
    with httpx.Client(headers=headers, timeout=120) as http, ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: http.post(url, json=body), bodies))


def test_parallel_rewards_never_add_up_to_infinity(gateway: RunningGateway) -> None:
    for _ in range(5):
        path = f"/sessions/{gateway.session()['session_id']}"
        replies = at_once(f"{gateway.url}{path}/reward", [{"value": HUGE}] * 8)
        assert sorted(reply.status_code for reply in replies) == [200, *[400] * 7]
        refused = next(reply for reply in replies if reply.status_code == 400)
        assert refused.json()["error"]["param"] == "value"
        assert gateway.get(path).json()["reward"] == HUGE
    assert gateway.get("/sessions").status_code == 200


def test_rewards_are_finite_however_they_are_added(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    turn_id = gateway.chat(path=f"{path}/v1/chat/completions").headers["x-weir-turn-id"]
    of_turn = {"value": HUGE, "turn_id": turn_id, "key": "a"}
    for _ in range(2):
        assert gateway.post(f"{path}/reward", of_turn).status_code == 200, "it may be said twice"
    for value in (HUGE, -HUGE):
        assert gateway.post(f"{path}/reward", {"value": value, "turn_id": turn_id}).status_code == 400, value
        assert gateway.post(f"{path}/reward", {"value": value}).status_code == 400, value
    refused = gateway.post(f"{path}/finish", {"status": "completed", "reward": HUGE})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reward")
    view = gateway.get(path).json()
    assert (view["state"], view["turns"][0]["reward"]) == ("open", HUGE)


def test_an_infinite_session_of_an_older_build_is_shown_and_takes_no_further_reward(
    gateway: RunningGateway,
) -> None:
    session_id = gateway.session()["session_id"]
    for name in "ab":
        reward = Reward(session_id=session_id, value=HUGE, key=name, created_at=1.0)
        gateway.redis.hset(keys.session(session_id), f"r:{name}", encode(reward))
    path = f"/sessions/{session_id}"
    for shown in (path, "/sessions", "/admin/pipeline"):
        assert gateway.get(shown, key=ADMIN_KEY).status_code == 200, shown
    assert gateway.get(path).json()["reward"] > HUGE
    gateway.chat(path=f"{path}/v1/chat/completions")
    exported = gateway.get("/admin/export", key=ADMIN_KEY)
    assert msgspec.json.decode(exported.content.splitlines()[0])["session"]["reward"] > HUGE
    assert gateway.post(f"{path}/reward", {"value": 1.0}).status_code == 400
    assert gateway.post(f"{path}/reward", {"value": HUGE, "key": "a"}).status_code == 200
