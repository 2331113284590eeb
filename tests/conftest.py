"""What tests share: a real Redis, started once, on a port of its own."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from redis import Redis
from redis.exceptions import RedisError
from tokenizers import Tokenizer

from tests.support.redis_process import redis_executable
from tests.support.serving import free_port

# How long a draw takes says something of the machine, and nothing of what is tested.
settings.register_profile("weir", suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", parent=settings.get_profile("weir"), max_examples=1000)
settings.load_profile("weir")

ROOMS = ("system", "trainer_service", "rollout_server")
"""Whose tests take longest: workers begin with them, so that none is busy alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes whole files, whose fixtures are made once; tests of the whole system share an engine."""

    def room(item: pytest.Item) -> str:
        return item.path.relative_to(Path(__file__).parent).parts[0]

    for item in items:
        item.add_marker(pytest.mark.xdist_group("system" if room(item) == "system" else item.path.stem))
    items.sort(key=lambda item: ROOMS.index(room(item)) if room(item) in ROOMS else len(ROOMS))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    command = [redis_executable(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    server = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    client = Redis.from_url(url)
    for _ in range(100):
        try:
            client.ping()
            break
        except RedisError:
            time.sleep(0.05)
    yield url
    client.close()
    server.terminate()
    server.wait()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with tokenizer and weights, made once."""
    from tests.support.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
