"""The run of `weir demo`, with services that go on, and a second rollout server, for the page to show.

model ──▶ the stack's services ◀── a second rollout server;  the demo's agents ──▶ episodes ──▶ versions
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollout_queue.http.callers import bearer
from tests.support.rollout_server.processes import running
from tests.support.serving import free_port
from tests.support.system.real_system import ENGINE_PYTHON, second_server
from tests.support.waiting import wait_until
from weir.demo.demo_episodes import EpisodeLog, EpisodeRunner
from weir.demo.run_demo import GROUP_SIZE, GROUPS_IN_FLIGHT, MAX_EPISODES
from weir.demo.settings import with_demo_model
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

SEED = 0
CLIENT_KEY, ADMIN_KEY = "page-client", "page-admin"
SECOND = "rollout-1"
VERSIONS = 8
"""So many are served before the page is looked at. The demo's model learns within about ten."""
BOOTS_WITHIN_S = 1800.0
"""An engine starts on few and busy cores."""


@dataclass(frozen=True)
class DemoRun:
    """The services of a run. Its agents play only while `play` does."""

    url: str
    metrics: Path
    """The trainer's JSON lines."""

    def ask(self, path: str, method: str = "GET", **body: Any) -> Any:
        reply = httpx.request(
            method, self.url + path, headers=bearer(ADMIN_KEY), json=body or None, timeout=120
        )
        reply.raise_for_status()
        return reply.json()

    def trainer(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.ask("/admin/status")["trainer"]
        return found

    def serving(self) -> int:
        return int(self.ask("/admin/policies/serving")["serving"] or 0)

    def play(self, enough: Callable[[EpisodeLog], bool]) -> None:
        """Play the demo's episodes, in a thread: Playwright has an event loop in this one."""
        agents = EpisodeRunner(
            self.url, CLIENT_KEY, group_size=GROUP_SIZE, groups_in_flight=GROUPS_IN_FLIGHT, seed=SEED
        )
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(agents.play(enough))).result()


@contextmanager
def demo_run(folder: Path) -> Iterator[DemoRun]:
    """Start the services, and play the demo's episodes until VERSIONS were served and nothing is trained any
    more. Raises AssertionError if the second server ends, or MAX_EPISODES are too few."""
    settings = _settings(folder)
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=BOOTS_WITHIN_S)
        given = second_server(settings, stack.gateway_url, folder, SECOND)
        with running(folder, given, ADMIN_KEY) as second:
            run = DemoRun(stack.gateway_url, settings.run_dir / "metrics.jsonl")

            def ready() -> bool:
                assert second.process.poll() is None, second.log.read_text()[-3000:]
                return _ready(run) == 2

            wait_until(ready, BOOTS_WITHIN_S)
            run.play(lambda log: _enough(run, log))
            wait_until(lambda: _settled(run))
            yield run


def _settings(folder: Path) -> StackSettings:
    ports = ("redis_port", "gateway_port", "rollout_port", "engine_port", "trainer_port", "rewards_port")
    given: dict[str, Any] = {name: free_port() for name in ports}
    given |= {"rollout_server_key": "page-rollout-server", "trainer_key": "page-trainer"}
    settings = StackSettings(
        run_dir=folder / "run",
        engine_python=ENGINE_PYTHON,
        client_keys=[CLIENT_KEY],
        admin_keys=[ADMIN_KEY],
        services={"gateway": {"page": {"every_s": 0.5}}},
        **given,
    )
    return with_demo_model(settings, SEED, print)[0]


def _enough(run: DemoRun, log: EpisodeLog) -> bool:
    if len(log.episodes) >= MAX_EPISODES:
        raise AssertionError(f"{run.serving()} versions after {MAX_EPISODES} episodes")
    return run.serving() >= VERSIONS


def _ready(run: DemoRun) -> int:
    return sum(each["state"] == "ready" for each in run.ask("/admin/rollout_servers")["data"])


def _settled(run: DemoRun) -> bool:
    """Whether the newest version is served everywhere, and the trainer waits for more groups."""
    plan, trainer = run.ask("/admin/policies/serving"), run.trainer()
    return (
        trainer["state"] == "waiting"
        and plan["serving"] == plan["target"] == trainer["version"]
        and _ready(run) == 2
    )
