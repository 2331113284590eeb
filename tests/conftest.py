"""What all tests share: a Redis for each worker, a tiny model, the profiles of hypothesis."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError
from tokenizers import Tokenizer

from tests.support.hypothesis_profiles import register
from tests.support.redis_process import redis_executable
from tests.support.serving import free_port
from tests.support.waiting import wait_until

register()

ROOMS = ("system", "trainer_service", "rollout_server")
"""Whose tests take longest: workers begin with them, so that none is busy alone at the end."""


@pytest.hookimpl(tryfirst=True)
@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes whole files, whose fixtures are made once; what asks for `system` shares one engine."""

    def room(item: pytest.Item) -> str:
        return item.path.relative_to(Path(__file__).parent).parts[0]

    def needs_engine(item: pytest.Item) -> bool:
        return "system" in getattr(item, "fixturenames", ()) or item.path.name == "test_demo.py"

    for item in items:
        in_system = room(item) == "system" and needs_engine(item)
        item.add_marker(pytest.mark.xdist_group("engine" if in_system else item.path.stem))
    items.sort(key=lambda item: ROOMS.index(room(item)) if room(item) in ROOMS else len(ROOMS))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    command = [redis_executable(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    server = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    client = Redis.from_url(url)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except RedisError:
            return False

    wait_until(answers)
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
