"""Opens canaries, and plays the groups that decide about them."""

from collections.abc import Callable
from typing import Any

from tests.support.gateway.deployment import Deployment
from tests.support.gateway.running import RunningGateway
from tests.support.waiting import wait_until

Earned = Callable[[int, int], float | None]
"""The reward of a member of a group, by the version that answered it and its place in the group."""
EVEN_ODDS: dict[str, Any] = {"share": 0.5, "min_groups": 3, "max_length_change": None}
MOST_GROUPS = 200
"""How many groups a test plays at most; with even odds, each arm misses all of them once in 2^200."""


def alternating(_: int, place: int) -> float:
    return float(place % 2)


def admin(deployment: Deployment, method: str, path: str, body: Any = None) -> Any:
    return deployment.gateway.admin(method, f"/policies{path}", body)


def canary_of(deployment: Deployment, version: int) -> Any:
    return admin(deployment, "GET", f"/{version}/canary").json()


def state_of(deployment: Deployment, version: int) -> str:
    reply = admin(deployment, "GET", f"/{version}/canary")
    return reply.json()["state"] if reply.status_code == 200 else "none"


def begin(deployment: Deployment, version: int, body: Any = None, location: str | None = None) -> Any:
    """Register a version without serving it, and open its canary."""
    admin(deployment, "POST", "/hold", {})
    assert deployment.announce(version, location)["state"] == "held"
    reply = admin(deployment, "POST", f"/{version}/canary", body or {})
    assert reply.status_code == 200, reply.text
    wait_until(lambda: state_of(deployment, version) == "open")
    return reply.json()


def play(gateway: RunningGateway, earned: Earned = alternating, size: int = 2) -> set[int]:
    """One group: every member is called once and ends. Returns the versions that answered it."""
    versions: set[int] = set()
    for place, ticket in enumerate(gateway.post("/groups", {"size": size}).json()["sessions"]):
        reply = gateway.chat(session=ticket)
        assert reply.status_code == 200, reply.text
        (turn,) = gateway.turns(ticket)
        version = turn["versions"][0]["version"]
        versions |= {span["version"] for span in turn["versions"]}
        reward = earned(version, place)
        gateway.finish(ticket, **({} if reward is None else {"reward": reward}))
    return versions


def play_until_ended(deployment: Deployment, version: int, earned: Earned = alternating) -> list[set[int]]:
    """Play groups until the canary has ended. Returns the versions of each group."""
    groups = []
    while state_of(deployment, version) == "open":
        groups.append(play(deployment.gateway, earned))
        assert len(groups) < MOST_GROUPS, canary_of(deployment, version)
    return groups


def gate(canary: Any, name: str) -> Any:
    (found,) = [each for each in canary["gates"] if each["gate"] == name]
    return found
