"""A reward service on a real port."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from reward_service.app import create_app
from reward_service.sandbox_child import NOT_ISOLATED
from reward_service.settings import RewardSettings
from tests.support.serving import serving

CLIENT_KEY, ADMIN_KEY = "client-key", "admin-key"


@dataclass
class RunningRewards:
    """The reward service as its clients see it."""

    url: str
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    def openai(self, key: str = ADMIN_KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, key: str | None = ADMIN_KEY, **more: Any) -> httpx.Response:
        headers = ({"authorization": f"Bearer {key}"} if key else {}) | more.pop("headers", {})
        return self.http.post(self.url + path, headers=headers, **more)

    def run(
        self, grader: dict[str, Any], text: str = "", key: str | None = ADMIN_KEY, **more: Any
    ) -> httpx.Response:
        body = {"grader": grader, "model_sample": text, **more}
        return self.post("/v1/fine_tuning/alpha/graders/run", key, json=body)

    def get(self, path: str, key: str | None = ADMIN_KEY) -> httpx.Response:
        return self.http.get(self.url + path, headers={"authorization": f"Bearer {key}"} if key else {})

    def metric(self, name: str) -> float:
        """The value of a line of /metrics, 0 if there is none."""
        lines = self.http.get(f"{self.url}/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


@contextmanager
def reward_service(**settings: Any) -> Iterator[RunningRewards]:
    """A service with a client's and an admin's key; `settings` win."""
    given: dict[str, Any] = {"client_keys": [CLIENT_KEY], "admin_keys": [ADMIN_KEY]}
    with serving(create_app(RewardSettings(**given | settings)), loop="asyncio") as url:
        running = RunningRewards(url)
        try:
            yield running
        finally:
            running.http.close()


def without_namespaces(directory: Path) -> str:
    """A Python for graders to which the system grants no namespaces: it ends as they do then."""
    script = directory / "python"
    script.write_text(f"#!/bin/sh\nexit {NOT_ISOLATED}\n", encoding="ascii")
    script.chmod(0o755)
    return str(script)
