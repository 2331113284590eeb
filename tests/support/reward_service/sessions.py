"""Sessions that wait for a reward, and what a reward service has made of them."""

from typing import Any

from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.reward_service.running import RunningRewards
from tests.support.waiting import wait_until

QUICK = {"poll_every_s": 0.05, "backoff_limit_s": 0.1, "page": 2}
"""A service with these settings reads the list often."""
READINGS = 'weir_rewards_list_readings_total{outcome="read"}'


def answered(gateway: RunningGateway, session_id: str, answer: str, status: str = "completed") -> None:
    """Give the session one answer, and finish it."""
    gateway.engine.script.append(answer)
    assert gateway.chat("question", f"/sessions/{session_id}/v1/chat/completions").status_code == 200
    assert gateway.post(f"/sessions/{session_id}/finish", {"status": status}).status_code == 200


def finished(gateway: RunningGateway, answer: str = "hello", **session: Any) -> str:
    """A session with one answer that is finished, and waits for a reward."""
    session_id: str = gateway.session(**session)["session_id"]
    answered(gateway, session_id, answer)
    return session_id


def opened_group(gateway: RunningGateway, size: int, **more: Any) -> list[str]:
    members = gateway.post("/groups", {"size": size, **more}).json()["sessions"]
    return [member["session_id"] for member in members]


def group_of(gateway: RunningGateway, *answers: str) -> list[str]:
    """A group whose sessions gave these answers, and are finished."""
    members = opened_group(gateway, len(answers))
    for session_id, answer in zip(members, answers, strict=True):
        answered(gateway, session_id, answer)
    return members


def shown(gateway: RunningGateway, session_id: str) -> dict[str, Any]:
    found: dict[str, Any] = gateway.get(f"/sessions/{session_id}", key=ADMIN_KEY).json()
    return found


def reward_of(gateway: RunningGateway, session_id: str) -> Any:
    """The first reward of the session, once it has one."""
    return wait_until(lambda: shown(gateway, session_id)["rewards"])[0]


def values_of(gateway: RunningGateway, session_id: str) -> list[float]:
    """The rewards that the session has now."""
    return [each["value"] for each in shown(gateway, session_id)["rewards"]]


def outcomes(rewards: RunningRewards, rule: str, outcome: str) -> float:
    return rewards.metric(f'weir_rewards_sessions_total{{outcome="{outcome}",rule="{rule}"}}')


def wait_for(rewards: RunningRewards, rule: str, outcome: str, count: int = 1) -> None:
    wait_until(lambda: outcomes(rewards, rule, outcome) >= count)


def two_more_readings(rewards: RunningRewards) -> None:
    """Wait until the list was read twice more, once of it from the start."""
    before = rewards.metric(READINGS)
    wait_until(lambda: rewards.metric(READINGS) >= before + 2)
