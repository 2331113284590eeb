"""The reward service among the services of `weir up`: started, restarted, and told by `weir status`."""

import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.serving import free_port
from tests.support.waiting import wait_until
from weir import status
from weir.errors import ServiceDied, StackError
from weir.stack import state
from weir.stack.services import services_of
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
from weir.stack.supervisor import Supervisor

RULE = {"name": "half", "kind": "python", "source": "def grade(sample, item):\n    return 0.5\n"}


def settings_of(gateway: RunningGateway, run_dir: Path, **rule: str) -> StackSettings:
    """Those of a stack with the port of this gateway."""
    rewards = {"rules": [RULE | rule], "dispatch": {"poll_every_s": 0.1}}
    return StackSettings(
        run_dir=run_dir,
        gateway_port=urlsplit(gateway.url).port or 0,
        rewards_port=free_port(),
        admin_keys=[ADMIN_KEY],
        services={"rewards": rewards},
    )


def rewarded(gateway: RunningGateway) -> list[float]:
    """Finish a session without a reward, and wait for its reward."""
    gateway.engine.script.append("hello")
    path = f"/sessions/{gateway.session()['session_id']}"
    assert gateway.chat("hi", f"{path}/v1/chat/completions").status_code == 200
    gateway.post(f"{path}/finish", {"status": "completed"})
    given = wait_until(lambda: gateway.get(path).json()["rewards"])
    return [each["value"] for each in given]


def test_it_rewards_is_told_and_comes_back_after_a_kill(gateway: RunningGateway, tmp_path: Path) -> None:
    settings = settings_of(gateway, tmp_path / "run")
    with Stack(settings, [services_of(settings)[-1]]) as stack:
        stack.wait_ready(60)
        assert rewarded(gateway) == [0.5]
        (row,) = status.rows_of(state.read(settings.run_dir), ADMIN_KEY)  # type: ignore[arg-type]
        assert (row.name, row.state) == ("reward_service", "ready")
        assert row.detail == "in_work 0, dead_letters 0"
        (unauthorised,) = status.rows_of(state.read(settings.run_dir), "unknown")  # type: ignore[arg-type]
        assert "401" in unauthorised.detail
        supervisor = Supervisor(stack)
        process = stack.processes["reward_service"]
        os.kill(process.pid, signal.SIGKILL)

        def restarted() -> bool:
            supervisor.check()
            return process.restarts == 1 and stack.waiting_for() == ""

        wait_until(restarted, 60)
        assert rewarded(gateway) == [0.5]


def test_a_rule_without_a_url_is_refused_before_anything_starts(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    with pytest.raises(StackError, match=r"rewards\.rules\.0\.http\.url"):
        services_of(settings_of(gateway, tmp_path / "run", kind="http"))


@pytest.mark.long
def test_a_rule_that_cannot_work_is_the_reason_why_nothing_starts(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    rule = {"name": "half", "kind": "python", "source_file": str(tmp_path / "nowhere.py")}
    services = {"rewards": {"rules": [rule]}}
    settings = settings_of(gateway, tmp_path / "run").model_copy(update={"services": services})
    with (
        Stack(settings, [services_of(settings)[-1]]) as stack,
        pytest.raises(ServiceDied, match=r"reward_service ended with exit code 1(.|\n)*rewards\.rules"),
    ):
        stack.wait_ready(60)
