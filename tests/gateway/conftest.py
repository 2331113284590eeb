"""A gateway on a real port, in front of a fake engine, on a real Redis."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis import Redis
from tokenizers import Tokenizer

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.gateway.fake_engine import FakeEngine
from tests.serving import serving

CLIENT_KEY, OTHER_KEY, ADMIN_KEY = "client-key", "other-key", "admin-key"


@dataclass
class Door:
    """The gateway from outside, and the fake engine behind it."""

    url: str
    engine: FakeEngine
    redis: Redis

    def call(
        self, method: str, path: str, body: Any = None, key: str | None = CLIENT_KEY, **more: Any
    ) -> Any:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers |= more.pop("headers", {})
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=10, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        return self.call("POST", path, {} if body is None else body, **more)

    def get(self, path: str, **more: Any) -> Any:
        return self.call("GET", path, **more)

    def chat(self, text: str = "hi", path: str = "/v1/chat/completions", **more: Any) -> Any:
        fields = {name: more.pop(name) for name in list(more) if name not in ("key", "headers")}
        return self.post(path, {"messages": [{"role": "user", "content": text}], **fields}, **more)

    def session(self, **body: Any) -> dict[str, Any]:
        reply = self.post("/sessions", body)
        assert reply.status_code == 201, reply.text
        opened: dict[str, Any] = reply.json()
        return opened

    def client(self, session: dict[str, Any]) -> openai.OpenAI:
        return openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)


@pytest.fixture
def door(redis_url: str, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[Door]:
    redis = Redis.from_url(redis_url)
    redis.flushall()
    engine = FakeEngine(tokenizer)
    with serving(engine.app()) as engine_url:
        settings = GatewaySettings(
            redis_url=redis_url,
            model_path=tiny_model,
            engines=[engine_url],
            client_keys=[CLIENT_KEY, OTHER_KEY],
            admin_keys=[ADMIN_KEY],
            engine_wait_s=0.5,
            poll_every_s=0.05,
        )
        with serving(create_app(settings)) as url:
            door = Door(url, engine, redis)
            for _ in range(100):
                if door.get("/ready").status_code == 200:
                    break
            yield door
    redis.close()
