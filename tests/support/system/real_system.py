"""The whole system, with the real Redis, SGLang, gateway and DeepSpeed, and a tiny random model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.support.redis_process import RedisProcess
from tests.support.serving import free_port
from tests.support.system.services_here import ServicesHere
from tests.support.waiting import wait_until
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

CLIENT_KEY, ADMIN_KEY = "system-client", "system-admin"
PORTS = (
    "WEIR_STACK__REDIS_PORT",
    "WEIR_GATEWAY__PORT",
    "WEIR_ROLLOUT_SERVER__PORT",
    "WEIR_ROLLOUT_SERVER__ENGINE_PORT",
    "WEIR_TRAINER__PORT",
)
"""The variables for the ports of `weir up`."""
BOOTS_WITHIN_S = 1200.0
"""How long an engine may take to start on a busy machine."""
ENGINE_PYTHON = Path(".venv-engine/bin/python")
FORKING_ENGINE = Path(__file__).with_name("forking_engine.py")
"""In place of ENGINE_PYTHON, it starts the same engine at a third of the cost."""


def stack_settings(run_dir: Path, model: Path, client_key: str, admin_key: str, **more: Any) -> StackSettings:
    """The settings of a stack on ports of its own."""
    ports = ("redis_port", "gateway_port", "rollout_port", "engine_port", "trainer_port")
    given = {name: free_port() for name in ports} | more
    return StackSettings(
        run_dir=run_dir, model_path=model, client_keys=[client_key], admin_keys=[admin_key], **given
    )


def system_settings(run_dir: Path, model: Path, **rollout_server: Any) -> StackSettings:
    """The settings of a whole system on ports of its own, with more settings for its rollout server."""
    return stack_settings(
        run_dir,
        model,
        CLIENT_KEY,
        ADMIN_KEY,
        engine_python=ENGINE_PYTHON,
        rollout_server_key="system-rollout-server",
        trainer_key="system-trainer",
        services={
            "gateway": {"engine_wait_s": 1200, "failover_patience_s": 1200},
            "rollout_server": {"max_running_requests": 16, "max_total_tokens": 32768, **rollout_server},
            "trainer": {
                "checkpoint_every_steps": 1,  # verdicts of trained sessions come with the next checkpoint
                "threads": 1,
                "optimizer": {"lr": 1e-3},
                "algorithm": {"min_live_rows": 4, "max_tokens": 4096},
            },
        },
    )


def second_server(settings: StackSettings, gateway_url: str, folder: Path, name: str) -> dict[str, Any]:
    """The settings of one more rollout server, with an engine of its own, for `running` to start."""
    run_dir, model = settings.run_dir.absolute(), settings.model_path
    assert model is not None
    return {
        **settings.services["rollout_server"],
        "id": name,
        "rollout_server_key": settings.rollout_server_key,
        "port": free_port(),
        "engine_port": free_port(),
        "engine_python": ENGINE_PYTHON.absolute(),
        "engine_device": "cpu",
        "engine_log": folder / "second-engine.log",
        "model_path": model.absolute(),
        "gateway_url": gateway_url,
        "policies_dir": run_dir / "policies",
        "weights_dir": run_dir / "weights",
    }


@dataclass
class System:
    """The running services, as their clients and operators see them."""

    stack: Stack | ServicesHere
    settings: StackSettings

    @property
    def redis(self) -> RedisProcess:
        """For a test that stops it."""
        assert isinstance(self.stack, ServicesHere)
        return self.stack.redis

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.settings.engine_port}"

    def request(
        self, method: str, path: str, body: Any = None, *, key: str = CLIENT_KEY, url: str = ""
    ) -> Any:
        base = url or self.stack.gateway_url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.request(method, base + path, json=body, headers=headers, timeout=120)

    def get(self, path: str, **more: Any) -> Any:
        return self.request("GET", path, **more).raise_for_status().json()

    def post(self, path: str, body: Any, **more: Any) -> Any:
        return self.request("POST", path, body, **more).raise_for_status().json()

    def status(self) -> Any:
        return self.get("/admin/status", key=ADMIN_KEY)

    def serving(self) -> int:
        return int(self.status()["policy"]["serving"])

    def trainer(self, path: str) -> Any:
        return self.get(path, key=ADMIN_KEY, url=self.stack.trainer_url)

    def rollout(self, path: str = "/status") -> Any:
        return self.get(path, key=ADMIN_KEY, url=self.stack.rollout_url)

    def client(self, ticket: dict[str, Any]) -> openai.OpenAI:
        return openai.OpenAI(base_url=ticket["base_url"], api_key=ticket["api_key"], max_retries=0)

    def say(self, ticket: dict[str, Any], text: str, **more: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": text}]
        asked = {"max_tokens": 8, **more}
        return self.client(ticket).chat.completions.create(model="policy", messages=messages, **asked)

    def trained(self) -> int:
        """A served version that the trainer has made; trains a group if there is none."""
        if self.serving() == 0:
            self.train_one_group()
            wait_until(lambda: self.serving() > 0)
        return self.serving()

    def train_one_group(self, size: int = 4) -> list[str]:
        """Train a group whose members earn 0 and 1 in turn; return the session ids."""
        tickets = self.post("/groups", {"size": size})["sessions"]
        for index, ticket in enumerate(tickets):
            self.say(ticket, "tell me")
            self.end(ticket, float(index % 2))
        return [ticket["session_id"] for ticket in tickets]

    def train_group(self, size: int, play: Callable[[dict[str, Any], int], object]) -> list[str]:
        """As `train_one_group`, with calls by `play(ticket, number)`. Returns once a new one is served."""
        before = self.serving()
        tickets = self.post("/groups", {"size": size})["sessions"]
        for number, ticket in enumerate(tickets):
            play(ticket, number)
            self.end(ticket, float(number % 2))
        wait_until(lambda: self.serving() > before)
        return [ticket["session_id"] for ticket in tickets]

    def end(self, ticket: dict[str, Any], reward: float) -> None:
        self.post(f"/sessions/{ticket['session_id']}/finish", {"status": "completed", "reward": reward})


@contextmanager
def running_system(settings: StackSettings) -> Iterator[System]:
    """The processes of `weir up`, once all are ready."""
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=BOOTS_WITHIN_S)
        yield System(stack, settings)
