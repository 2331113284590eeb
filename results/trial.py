"""One run of an experiment on the real stack.

first model ─▶ stack up ─▶ evaluation ─▶ training ─▶ evaluation ─▶ TrialResult
"""

import asyncio
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bench.isolated_stack import isolated_stack
from bench.processes import free_port
from environments.results import EpisodeEnded, each_episode
from environments.settings import RunSettings
from environments.start_run import RunPlace, play_run
from results.cpu_clock import CpuClock
from results.experiment import Experiment, Say, Variant
from results.figures import Judged, Spent, TrialResult, curve_of
from weir.demo.settings import services_of_demo
from weir.stack.service_process import Service, http_ready
from weir.stack.services import merged, services_of
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

EVAL_SEED = 100_000
"""Tasks of evaluations are drawn with other seeds than those of the training."""
PINNED_WITHIN_S = 60.0
LARGE_FOLDERS = ("redis", "policies", "weights", "checkpoints", "tensorboard")


@dataclass(frozen=True)
class Place:
    """Where runs leave their files, and where first models are kept."""

    work: Path
    models: Path


def run(experiment: Experiment, name: str, seed: int, place: Place, say: Say) -> TrialResult:
    """Raises StackError if a service dies or the warm start fails."""
    variant = experiment.variants[name]
    run_dir = place.work / f"{experiment.name}-{name}-seed{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = stack_settings(experiment, variant, seed, run_dir, experiment.model(place.models, say))
    training = training_of(experiment, variant, seed)
    judging = evaluation_of(experiment, training)
    services = services_of(settings)
    if experiment.against_first:
        services = (*services, second_server(services, settings))
    with Stack(settings, services) as stack:
        stack.wait_ready(on_wait=say)
        admin = Admin(stack.gateway_url, settings.admin_keys[0])
        if experiment.against_first:
            admin.pin_first()
        here = RunPlace(run_dir, stack.gateway_url, settings.client_keys[0])

        def played(part: str, fields: dict[str, Any]) -> dict[str, Any]:
            return asyncio.run(play_run(RunSettings(**fields), replace(here, run_dir=run_dir / part), say))

        before = played("before", judging)
        with CpuClock() as clock:
            trained = played("train", training)
        after = played("after", judging)
        version, verdicts = admin.serving(), admin.verdicts()
    for left in LARGE_FOLDERS:
        shutil.rmtree(run_dir / left, ignore_errors=True)
    ended = [each for each in each_episode(run_dir / "train") if each.reward is not None]
    ended.sort(key=lambda each: each.ended_at)
    return TrialResult(
        experiment=experiment.name,
        variant=name,
        seed=seed,
        before=Judged(**before["reward"]),
        after=Judged(**after["reward"]),
        versions=version,
        left_out=trained["tasks_left_out"],
        verdicts=verdicts,
        curve=curve_of([each.reward or 0.0 for each in ended], spent_by(ended, clock)),
        load=round(os.getloadavg()[0], 1),
    )


def spent_by(ended: Sequence[EpisodeEnded], clock: CpuClock) -> list[Spent]:
    """What the run had spent when each episode ended."""
    return [
        Spent(
            number,
            round(clock.seconds_at(each.ended_at), 1),
            round(clock.cpu_s_at(each.ended_at), 1),
        )
        for number, each in enumerate(ended, start=1)
    ]


def training_of(experiment: Experiment, variant: Variant, seed: int) -> dict[str, Any]:
    """Fields of `RunSettings`."""
    return {"seed": seed, **experiment.run, **variant.run}


def evaluation_of(experiment: Experiment, training: dict[str, Any]) -> dict[str, Any]:
    """Fields of `RunSettings`."""
    return {
        **{name: value for name, value in training.items() if name != "episodes"},
        "mode": "eval",
        "skip_after": 0,
        "stop_uniform_after": 0,
        "seed": EVAL_SEED + training["seed"],
        **experiment.judged,
    }


def stack_settings(
    experiment: Experiment, variant: Variant, seed: int, run_dir: Path, model: Path
) -> StackSettings:
    return isolated_stack(run_dir, model, services_of_experiment(experiment, variant, seed))


def services_of_experiment(experiment: Experiment, variant: Variant, seed: int) -> dict[str, dict[str, Any]]:
    """Sections of weir.yaml."""
    return merged(merged(services_of_demo(seed), experiment.services), variant.services)


def second_server(services: Sequence[Service], settings: StackSettings) -> Service:
    """A rollout server with an engine of its own, beside the first one."""
    first = next(each for each in services if each.name == "rollout_server")
    port, engine_port = free_port(), free_port()
    own = {
        "ID": "rollout-1",
        "PORT": str(port),
        "ENGINE_PORT": str(engine_port),
        "ENGINE_LOG": str((settings.logs_dir / "engine-1.log").absolute()),
        "WEIGHTS_DIR": str((settings.run_dir / "weights" / "rollout-1").absolute()),
    }
    environment = {f"WEIR_ROLLOUT_SERVER__{name}": value for name, value in own.items()}
    url = f"http://127.0.0.1:{port}"
    return replace(
        first,
        name="rollout_server-1",
        ports=dict.fromkeys((port, engine_port), "rollout_server of the first model"),
        url=url,
        ready=http_ready(url),
        environment={**first.environment, **environment},
    )


class Admin:
    """The gateway's admin endpoints that a run needs."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._asking: Any = {"headers": {"authorization": f"Bearer {key}"}, "timeout": 60.0}

    def pin_first(self) -> None:
        """Keep version 0 on one server, for calls that name it. The gateway may not know both servers yet."""
        deadline = time.monotonic() + PINNED_WITHIN_S
        while True:
            answer = httpx.post(f"{self._url}/admin/policies/0/pin", json={"servers": 1}, **self._asking)
            if answer.status_code != httpx.codes.CONFLICT or time.monotonic() > deadline:
                break
            time.sleep(0.5)  # the gateway asks its servers every few seconds
        answer.raise_for_status()

    def serving(self) -> int:
        return int(self._asked("/admin/policies/serving")["serving"])

    def verdicts(self) -> dict[str, int]:
        """The number of sessions by verdict."""
        counts = self._asked("/admin/pipeline")["verdicts"].items()
        return {name.partition(":")[2]: count for name, count in counts if name.startswith("session:")}

    def _asked(self, path: str) -> Any:
        return httpx.get(f"{self._url}{path}", **self._asking).raise_for_status().json()
