"""Starts answers in the background, and reads them by their ids."""

from typing import Any

from tests.support.gateway.running import RunningGateway
from tests.support.waiting import wait_until

PATH = "/v1/responses"
ENDED = ("completed", "incomplete", "failed", "cancelled")


def start(gateway: RunningGateway, **more: Any) -> dict[str, Any]:
    """The response at once, and its session."""
    reply = gateway.post(PATH, {"input": "hi", "background": True, **more})
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    assert (told["status"], told["background"], told["output"]) == ("in_progress", True, [])
    return {**told, "session_id": reply.headers["x-weir-session-id"]}


def read(gateway: RunningGateway, told: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = gateway.get(f"{PATH}/{told['id']}").json()
    return found


def ended(gateway: RunningGateway, told: dict[str, Any]) -> dict[str, Any]:
    wait_until(lambda: read(gateway, told)["status"] in ENDED)
    return read(gateway, told)
