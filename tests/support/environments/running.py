"""A gateway for runs of environments, and what its sessions say afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from environments.settings import RunSettings
from environments.start_run import RunPlace, play_run
from gateway.app import create_app
from gateway.language.tokenizer_files import tokenizer_of
from gateway.settings import GatewaySettings
from tests.support.environments.answering_engine import AnsweringEngine
from tests.support.redis_clients import redis_at
from tests.support.serving import serving

TOYS = "python:tests.support.environments.toys"


@dataclass
class RunTest:
    """A gateway, and a directory for a run."""

    url: str
    engine: AnsweringEngine
    run_dir: Path

    @property
    def place(self) -> RunPlace:
        return self.place_of(self.run_dir)

    def place_of(self, directory: Path) -> RunPlace:
        return RunPlace(directory, self.url, None)

    def settings(self, toy: str, **given: Any) -> RunSettings:
        return RunSettings(environment=f"{TOYS}:{toy}", **({"step_s": 20.0} | given))

    async def play_library(
        self, environment: str, *, name: str = "run", toys: Path = Path(), **given: Any
    ) -> Any:
        """Play environments of a library, in its own Python environment; `toys` has those that are ours."""
        place = RunPlace(self.run_dir.with_name(name), self.url, None, directory=toys)
        return await play_run(RunSettings(environment=environment, **given), place, lambda line: None)

    async def play(self, toy: str, *, resume: bool = False, loop: str | None = None, **given: Any) -> Any:
        return await play_run(self.settings(toy, **given), self.place, lambda line: None, loop, resume)

    def delete(self, session_id: str) -> None:
        httpx.delete(f"{self.url}/sessions/{session_id}", timeout=120).raise_for_status()

    def sessions(self, **wanted: str) -> list[dict[str, Any]]:
        """The sessions in the order of their ids, each with its turns."""
        with httpx.Client(base_url=self.url, timeout=120) as http:
            page = http.get("/sessions", params={"limit": 1000, **wanted}).json()
            assert page["next_cursor"] is None
            ids = sorted(each["session_id"] for each in page["data"])
            found: list[dict[str, Any]] = [http.get(f"/sessions/{each}?text=true").json() for each in ids]
        return found


@contextmanager
def running_gateway(
    redis_url: str, model: Path, directory: Path, port: int | None = None, **settings: Any
) -> Iterator[RunTest]:
    """A gateway without keys, and an empty Redis."""
    own = redis_url.removesuffix("0") + "5"
    with redis_at(own) as redis:
        redis.flushdb()
    engine = AnsweringEngine(tokenizer_of(model))
    with serving(engine.app()) as engine_url:
        made = GatewaySettings(redis_url=own, model_path=model, engines=[engine_url], **settings)
        with serving(create_app(made), port) as url:
            yield RunTest(url, engine, directory / "run")
