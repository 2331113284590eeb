"""The agents' tests share a gateway process and a real Redis. Each test scripts the answers of the engine."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.language.tokenizer_files import tokenizer_of
from rollout_queue.redis import key_names
from tests.support.agents.acting_engine import FAMILY, ActingEngine
from tests.support.agents.running import RunningAgents
from tests.support.gateway.families_models import make_model
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import ADMIN_KEY, Backends
from tests.support.redis_clients import redis_at
from tests.support.serving import serving

CONTEXT_LENGTH = 2**18
"""Enough for every agent's system prompt. The small tokenizer makes more tokens of a text than a real one."""


@pytest.fixture(scope="session")
def processes(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    model = make_model(tmp_path_factory.mktemp("model"), FAMILY)
    tokenizer = tokenizer_of(model)
    backends = Backends(redis_url, model, tokenizer, redis_at(redis_url), ActingEngine(tokenizer))
    with serving(backends) as backends.engine_url:
        yield Processes(backends, tmp_path_factory.mktemp("logs"))
    backends.redis.close()


@pytest.fixture(scope="session")
def gateway_url(processes: Processes) -> Iterator[str]:
    with processes.gateway(renderer=FAMILY, context_length=CONTEXT_LENGTH) as (_, gateway):
        yield gateway.url


@pytest.fixture
def agents(processes: Processes, gateway_url: str, tmp_path: Path) -> Iterator[RunningAgents]:
    """Each test gets an empty Redis, a fresh engine and empty folders."""
    backends = processes.backends
    backends.clear(bytes(backends.redis.get(key_names.SECRET) or b""))  # type: ignore[arg-type]
    backends.engine = engine = ActingEngine(backends.tokenizer)
    for folder in ("work", "home"):
        (tmp_path / folder).mkdir()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=gateway_url, headers=headers, timeout=30) as http:
        yield RunningAgents(gateway_url, http, engine, tmp_path / "work")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test 10 minutes, because some agents take minutes to start on a busy machine."""
    for item in items:
        item.add_marker(pytest.mark.timeout(600))
