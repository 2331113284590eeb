"""One real stack whose trainer carries out commands, users' loops against it, and kills of its parts."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.clients.stack import CLIENT_KEY, ENVIRONMENTS, HERMETIC, ROOT, inherited, told
from tests.support.system.real_system import stack_settings
from tests.support.threads import meanwhile
from tests.support.waiting import wait_until
from trainer_service.commands.saved_models import safe_name
from weir.stack.services import services_of
from weir.stack.stack import Stack

ADMIN_KEY = "tinker-admin"
READY_WITHIN_S = 1200.0
MOST_KILLS = int(os.environ.get("TINKER_KILLS", "8"))
LOOP_WITHIN_S = max(900.0, 60.0 * MOST_KILLS)
PARTS = ("trainer_service", "gateway", "rollout_server", "redis")
LORA = {"max_rank": 8, "max_loaded": 8}
PROGRAMS = {
    "cookbook_former": "cookbook_newest",
    "tinker_first": "tinker_newest",
    "tinker_middle": "tinker_newest",
}
"""The versions of an SDK whose user's program is that of another version."""


@dataclass
class TinkerStack:
    """The running stack. `model` is the directory of its base model."""

    stack: Stack
    model: Path
    kills: list[str] = field(default_factory=list)

    def play(self, client: str, scene: str, **more: str) -> Any:
        """Run a scene of a user's program in the environment of this SDK; returns what it printed last."""
        given = {
            "TINKER_BASE_URL": self.stack.gateway_url,
            "TINKER_API_KEY": f"tml-{CLIENT_KEY}",
            "MODEL": str(self.model),
            "PYTHONWARNINGS": "ignore",
        }
        script = ROOT / "tests/clients" / PROGRAMS.get(client, client) / "play.py"
        command: list[str | Path] = [ENVIRONMENTS / client / "bin" / "python", script, scene]
        return told(command, inherited() | HERMETIC | given | more, LOOP_WITHIN_S)

    def adapter(self, model_id: str, version: int) -> Path:
        """The directory of an adapter's version that the trainer has published."""
        (found,) = self.stack.settings.run_dir.glob(f"**/adapters/{safe_name(model_id)}/v{version:08d}")
        return found

    @contextmanager
    def killing(self, seed: int, most: int, pause_s: tuple[float, float]) -> Iterator[None]:
        """Kill random parts, one after the other, each once the last one is back; `most` at most."""
        over = threading.Event()
        with meanwhile(over, lambda: self._kill(random.Random(seed), most, pause_s, over)):
            yield

    def _kill(
        self, draw: random.Random, most: int, pause_s: tuple[float, float], over: threading.Event
    ) -> None:
        victims = [name for name in PARTS for _ in range(3 if name == "trainer_service" else 1)]
        while len(self.kills) < most and not over.wait(draw.uniform(*pause_s)):
            name = draw.choice(victims)
            process = psutil.Process(self.stack.processes[name].pid)
            process.send_signal(signal.SIGKILL)
            process.wait(300)
            self.kills.append(name)
            self.stack.restart(name)
            wait_until(lambda: not self.stack.waiting_for(), READY_WITHIN_S)


@contextmanager
def tinker_stack(run_dir: Path, model: Path) -> Iterator[TinkerStack]:
    """A stack in `run_dir`. The SDK cuts names with exactly two slashes, so the model lies deeper."""
    services = {
        "trainer": {"source": "commands"},
        "rollout_server": {"lora": LORA, "max_running_requests": 16, "max_total_tokens": 32768},
    }
    settings = stack_settings(run_dir, model, CLIENT_KEY, ADMIN_KEY, services=services)
    with Stack(settings, services_of(settings)) as stack:
        stack.wait_ready(timeout_s=READY_WITHIN_S)
        yield TinkerStack(stack, model)
