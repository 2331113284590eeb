"""What screenshots show: a deployment in the middle of its work, with a canary and a warning."""

import time
from typing import Any

from tests.support.page.deployment import METRICS, ShownDeployment
from tests.support.waiting import wait_until

VERSIONS = range(1, 13)
GROUPS = 24


def play(shown: ShownDeployment, group: str, size: int, ended: int, **first: Any) -> None:
    """Open a group, and end some of its sessions with a reward."""
    opened = shown.gateway.post("/groups", {"group_id": group, "size": size, "task_id": group}).json()
    for place, session in enumerate(opened["sessions"]):
        path = f"/sessions/{session['session_id']}"
        if place < ended or place == size - 1:
            assert shown.gateway.chat(path=f"{path}/v1/chat/completions").status_code == 200
        if place < ended:
            ending = {"status": "completed", "reward": float(place % 2)}
            assert shown.gateway.post(f"{path}/finish", ending).status_code == 200


def fill(shown: ShownDeployment) -> None:
    """Bring the deployment into the state that is shown."""
    for version in VERSIONS:
        shown.publish(version)
        wait_until(lambda version=version: _plan(shown)["serving"] == version)  # type: ignore[misc]
        wait_until(lambda: _plan(shown)["push"]["state"] == "serving")
    shown.admin("POST", "/admin/policies/hold", {"reason": "version 13 is tried first"})
    shown.publish(13)
    shown.admin("POST", "/admin/policies/13/canary", {"share": 0.5, "gates": {"min_groups": 30}})
    wait_until(lambda: _canary(shown)["state"] == "open")
    for number in range(GROUPS):
        play(shown, f"countdown-{4100 + number}", 2, 2)
    play(shown, "countdown-4131", 8, 5)
    play(shown, "chain-sum-977", 8, 2)
    shown.gateway.session(task_id="nim-12")
    shown.gateway.redis.hset("weir:policy_reserved", mapping={"version": 14, "location": "file:///srv/v14"})
    shown.gateway.redis.hset(
        "weir:verdicts",
        mapping={
            "session:trained": 1486,
            "session:zero_advantage": 212,
            "session:stale": 31,
            "session:expired": 7,
        },
    )
    shown.gateway.redis.xadd("weir:dead", {"error": "turn of a newer build: field 'experts'"})
    live(shown)


def live(shown: ShownDeployment) -> None:
    """Let the trainer report, and clients call, for as long as curves need to have a shape."""
    session = shown.gateway.session()
    for step in range(12):
        reward = 0.42 + 0.016 * step + 0.02 * (step % 3)
        shown.report(step=85 + step, metrics=METRICS | {"reward_mean": reward})
        for _ in range(1 + step % 4):
            shown.gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
        time.sleep(0.25)  # the page draws a curve over real time


def _plan(shown: ShownDeployment) -> Any:
    return shown.admin("GET", "/admin/policies/serving")


def _canary(shown: ShownDeployment) -> Any:
    return shown.admin("GET", "/admin/policies/13/canary")
