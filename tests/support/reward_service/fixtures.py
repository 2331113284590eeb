"""Fixtures: a gateway on a real port, in front of a fake engine, on a real Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.gateway.running import Backends, RunningGateway, backends_in
from tests.support.waiting import wait_until


@pytest.fixture(scope="session")
def reward_backends(redis_url: str, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[Backends]:
    with backends_in(6, redis_url, tiny_model, tokenizer) as backends:
        yield backends


@pytest.fixture
def gateway(reward_backends: Backends) -> Iterator[RunningGateway]:
    reward_backends.clear(None)
    with reward_backends.gateway() as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        yield gateway


@pytest.fixture(scope="session")
def gateway_url(reward_backends: Backends) -> Iterator[tuple[str, bytes]]:
    """A gateway that many tests share, and its secret."""
    reward_backends.clear(None)
    with reward_backends.gateway_url() as url:
        yield url, reward_backends.secret()


@pytest.fixture
def shared_gateway(reward_backends: Backends, gateway_url: tuple[str, bytes]) -> Iterator[RunningGateway]:
    with reward_backends.shared(*gateway_url) as gateway:
        yield gateway
