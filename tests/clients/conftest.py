"""Public client libraries, each in its own environment, call one real stack: Redis, SGLang, the gateway."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.clients.stack import ADMIN_KEY, CLIENT_KEY, ROOT, SHARP, Figures, RunningStack
from tests.support.environments.running import RunTest, running_gateway
from tests.support.system.real_system import BOOTS_WITHIN_S, stack_settings
from weir.stack.services import services_of
from weir.stack.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    settings = stack_settings(
        tmp_path_factory.mktemp("clients"),
        ROOT / "run" / "models" / "clients",
        CLIENT_KEY,
        ADMIN_KEY,
        services={
            "gateway": {"sampling": {"mode": "enforce", "temperature": SHARP}},
            "rollout_server": {"max_running_requests": 16, "max_total_tokens": 32768},
        },
    )
    services = [service for service in services_of(settings) if service.name != "trainer_service"]
    headers = {"authorization": f"Bearer {CLIENT_KEY}"}
    with Stack(settings, services) as running:
        running.wait_ready(timeout_s=BOOTS_WITHIN_S)
        with httpx.Client(base_url=running.gateway_url, headers=headers, timeout=30) as http:
            client_side = RunningStack(running.gateway_url, http)
            request.config.stash[FIGURES] = client_side.figures
            yield client_side


@pytest.fixture
def running(
    redis_url: str, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[RunTest]:
    """A real gateway. Its engine answers as the module's `answer` says, if it has one."""
    with running_gateway(redis_url, tiny_model, tmp_path) as running:
        running.engine.answer = getattr(request.module, "answer", running.engine.answer)
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test time to wait for the engine's start, because any test may run first."""
    for item in items:
        item.add_marker(pytest.mark.timeout(600))


FIGURES = pytest.StashKey[dict[str, Figures]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for client, figures in sorted(config.stash.get(FIGURES, {}).items()):
        terminalreporter.write_line(
            f"{client:18} {figures.scenes:3} scenes {figures.turns:4} turns {figures.seconds:6.1f} s"
        )
