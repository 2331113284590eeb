"""Fixtures: a real gateway in front of an engine that answers what a test tells it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from tokenizers import Tokenizer

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.support.environments.answering_engine import AnsweringEngine
from tests.support.environments.running import RunTest
from tests.support.serving import serving


@pytest.fixture
def running(redis_url: str, tiny_model: Path, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[RunTest]:
    own = redis_url.removesuffix("0") + "5"
    with Redis.from_url(own) as redis:
        redis.flushdb()
    engine = AnsweringEngine(tokenizer)
    with serving(engine.app()) as engine_url:
        settings = GatewaySettings(redis_url=own, model_path=tiny_model, engines=[engine_url])
        with serving(create_app(settings)) as url:
            yield RunTest(url, engine, tmp_path / "run")
