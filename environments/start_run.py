"""Builds a run from its settings, plays it, and writes what it leaves.

run/environments/NAME/   run.json   journal.jsonl   summary.json   reward.png   evaluations/
"""

import asyncio
import importlib
import json
import re
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from environments.agents import Loop, LoopedEpisodes, play_conversation, play_game
from environments.environment import EnvironmentSource
from environments.episode_group import PlayedBefore, unfinished_groups
from environments.episodes import EpisodePlayer, LibraryEpisodes, Plays, SeatPlan, one_address, own_addresses
from environments.errors import RunStopped, UnknownEnvironment
from environments.hosts import PLAY_THEMSELVES, HostedEnvironments, HostedLibrary, host_command, tools_command
from environments.intervals import judged
from environments.openenv_server import OpenEnvServer
from environments.results import (
    EpisodeEnded,
    Journal,
    RunResults,
    draw,
    draw_evaluations,
    each_entry,
    each_episode,
    with_versions,
    write_document,
)
from environments.run import EvaluationSchedule, Run, RunFigures, evaluations_in, telling
from environments.session_client import SessionClient
from environments.settings import RunSettings
from environments.task_order import TaskOrder
from environments.tools import ToolServers
from rollout_queue import clock

Say = Callable[[str], None]
Source = EnvironmentSource | HostedLibrary
NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
"""What the id of a run does not have: libraries name directories and containers after its sessions."""


@dataclass(frozen=True)
class RunPlace:
    """Where a run happens: its directory, the gateway, and the directory of libraries' environments."""

    run_dir: Path
    gateway_url: str
    client_key: str | None
    environments_dir: Path = Path("run/environments")
    directory: Path = Path()
    """Where hosts run, so that a class of the user is found."""


@dataclass(frozen=True)
class RunParts:
    """What a run is made from. The source and the gateway are open."""

    settings: RunSettings
    place: RunPlace
    source: Source
    gateway: SessionClient
    loop: Loop | str | None
    slots: asyncio.Semaphore
    """Of the episodes of the run and of its evaluations together."""


async def play_run(
    settings: RunSettings, place: RunPlace, say: Say, loop: str | None = None, resume: bool = False
) -> dict[str, Any]:
    """Play a run and return its summary. Raises UnknownEnvironment, GatewayFault and RunStopped."""
    _refuse_mixing(place.run_dir, resume)
    _refuse_what_a_library_decides(settings, loop)
    source = source_of(settings, place)
    async with source, SessionClient(place.gateway_url, place.client_key, settings.wait_s) as gateway:
        return await _play(_parts(settings, place, source, gateway, loop), say, resume)


def _parts(
    settings: RunSettings, place: RunPlace, source: Source, gateway: SessionClient, loop: Loop | str | None
) -> RunParts:
    return RunParts(settings, place, source, gateway, loop, asyncio.Semaphore(settings.concurrency))


async def _play(parts: RunParts, say: Say, resume: bool) -> dict[str, Any]:
    """Play the run, and write what it leaves."""
    settings, place = parts.settings, parts.place
    async with _begun(parts, resume) as run:
        if settings.mode == "train" and settings.eval_every:
            run.evaluations = _evaluations(parts, say)
        async with telling(run, say, parts.gateway.notice):
            await run.play()
    ended: Iterable[EpisodeEnded] = each_episode(place.run_dir)
    if settings.mode == "eval":
        ended = await with_versions(parts.gateway, ended)
    results = RunResults.of(ended, settings.mode)
    summary: dict[str, Any] = {
        "settings": settings.model_dump(mode="json"),
        "run": run.plan.run_id,
        "model": run.plan.model,
    }
    summary |= results.document() | {"tasks_left_out": run.order.skipped}
    if run.evaluations:
        found = evaluations_in(run.evaluations.directory)
        summary["evaluations"] = found
        draw_evaluations(place.run_dir / "evaluations.png", settings.environment, found)
    if settings.mode == "train" and (notice := await parts.gateway.notice()):
        summary["notice"] = notice
    write_document(place.run_dir / "summary.json", summary)
    draw(place.run_dir / "reward.png", settings.environment, results.rewards)
    return summary


def _evaluations(parts: RunParts, say: Say) -> EvaluationSchedule:
    """The evaluations during a training run. They use its environments unless theirs have other options."""
    settings, place, wanted = parts.settings, parts.place, parts.settings.evaluation

    async def judge(directory: Path, pinned: bool) -> dict[str, Any]:
        resume, model = (directory / "run.json").exists(), wanted.model
        if pinned and model is None:
            model = f"{await parts.gateway.model_name()}@{int(directory.name)}"
        of_version = wanted.model_copy(update={"model": model})
        evaluation = replace(parts, settings=of_version, place=replace(place, run_dir=directory))
        if wanted.options == settings.options:
            summary = await _play(evaluation, _silent, resume)
        else:
            async with source_of(wanted, place) as own:
                summary = await _play(replace(evaluation, source=own), _silent, resume)
        say(f"evaluation at version {int(directory.name)}: {judged(summary)}")
        return summary

    return EvaluationSchedule(parts.gateway, place.run_dir / "evaluations", settings.eval_every, judge)


def _silent(line: str) -> None:
    """An evaluation during a training run tells its result alone."""


@asynccontextmanager
async def opened_run(
    settings: RunSettings,
    place: RunPlace,
    source: Source,
    loop: Loop | str | None = None,
    resume: bool = False,
) -> AsyncIterator[tuple[Run, SessionClient]]:
    """A run that is ready to be played, and its client of the gateway. Raises UnknownEnvironment,
    GatewayFault and RunStopped."""
    _refuse_mixing(place.run_dir, resume)
    async with (
        source,
        SessionClient(place.gateway_url, place.client_key, settings.wait_s) as gateway,
        _begun(_parts(settings, place, source, gateway, loop), resume) as run,
    ):
        yield run, gateway


@asynccontextmanager
async def _begun(parts: RunParts, resume: bool) -> AsyncIterator[Run]:
    """A run with its journal. A model that answers no calls is refused before anything of the run is
    there."""
    run_dir = parts.place.run_dir
    for named in filter(None, (parts.settings.model, parts.settings.opponent)):
        await parts.gateway.check_model(named)
    run_id = str(read_run(run_dir)["run"]) if resume else _begin(parts.settings, run_dir)
    with Journal(run_dir) as journal:
        yield await _run(parts, run_id, journal)


def source_of(settings: RunSettings, place: RunPlace) -> Source:
    """The environments that the settings name: those of an OpenEnv server, or of a library in hosts. Raises
    UnknownEnvironment."""
    if settings.library in PLAY_THEMSELVES:
        options = {"max_turns": settings.max_turns, **settings.options, "wait_s": settings.wait_s}
        return HostedLibrary(*_hosts(settings, place), options)
    if settings.library == "openenv":
        source: EnvironmentSource = OpenEnvServer(settings)
    else:
        source = HostedEnvironments(*_hosts(settings, place), settings.options)
    if not settings.tool_servers:
        return source
    host = tools_command(place.environments_dir)
    return ToolServers(source, settings.tool_servers, host, place.directory, settings.step_s)


def _hosts(settings: RunSettings, place: RunPlace) -> tuple[list[str], Path, int, float]:
    """The command of the hosts, where they run, how many they are, and the seconds of one step."""
    command = host_command(settings.library, settings.name, settings.python, place.environments_dir)
    return command, place.directory, settings.hosts, settings.step_s


def _plays(parts: RunParts) -> Plays:
    """Who plays the episodes: the library itself, or an agent loop."""
    settings, place, source, loop = parts.settings, parts.place, parts.source, parts.loop
    limits: dict[str, Any] = {
        "time_limit_s": settings.episode_s,
        "graded_elsewhere": settings.graded_elsewhere,
    }
    if isinstance(source, HostedLibrary):
        known_by_header = settings.library == "verifiers"
        address = one_address(place.gateway_url, place.client_key) if known_by_header else own_addresses
        return LibraryEpisodes(source, address, source=settings.environment, **limits).play
    found = loop if callable(loop) else loop_of(loop, source.description.players)
    return LoopedEpisodes(parts.gateway, source, found, max_turns=settings.max_turns, **limits).play


async def _run(parts: RunParts, run_id: str, journal: Journal) -> Run:
    settings, source, gateway = parts.settings, parts.source, parts.gateway
    if settings.opponent and source.description.players == 1:
        raise UnknownEnvironment(f"{settings.environment} has one player, so it has no opponent")
    model = settings.model or await gateway.model_name()
    plan = SeatPlan(run_id, settings, model, source.description.players, source.description.frozen)
    known = source.description.task_count or 0
    size = min(settings.tasks, known) if settings.tasks and known else settings.tasks or known
    order = TaskOrder(source, settings.seed, size, settings.skip_after, once=settings.mode == "eval")
    player = EpisodePlayer(gateway, _plays(parts))
    before, figures = PlayedBefore(), RunFigures()
    for entry in each_entry(parts.place.run_dir):
        before.add(entry)
        if isinstance(entry, EpisodeEnded):
            figures.add(entry)
    again, found = await unfinished_groups(gateway, plan, journal, before)
    for entry in found:
        before.add(entry)
        figures.add(entry)
    order.visit = before.visit
    return Run(
        settings, order, player, plan, journal, parts.slots, again, before.group, before.episodes, figures
    )


def loop_of(name: str | None, player_count: int) -> Loop:
    """The loop `MODULE:FUNCTION` of the user, or the one that fits the number of players."""
    if name is None:
        return play_conversation if player_count == 1 else play_game
    module, _, function = name.partition(":")
    sys.path.append(str(Path.cwd()))
    try:
        found: Loop = getattr(importlib.import_module(module), function or "play")
    except (ImportError, AttributeError) as error:
        raise UnknownEnvironment(f"there is no loop {name!r}: {error}") from None
    return found


def _refuse_what_a_library_decides(settings: RunSettings, loop: str | None) -> None:
    """Raises UnknownEnvironment for what a library that plays by itself has no use for."""
    given = {"loop": loop, "opponent": settings.opponent, "tool servers": settings.tool_servers}
    if settings.library in PLAY_THEMSELVES and (taken := [name for name in given if given[name]]):
        raise UnknownEnvironment(
            f"{settings.library} plays its episodes itself, so it takes no {' and no '.join(taken)}"
        )


def _refuse_mixing(run_dir: Path, resume: bool) -> None:
    """Raises RunStopped if the directory holds another run, or none to resume."""
    exists = (run_dir / "run.json").exists()
    if resume and not exists:
        raise RunStopped(f"there is no run in {run_dir} to resume")
    if exists and not resume:
        raise RunStopped(f"{run_dir} holds a run: resume it with --resume, or name another directory")


def _begin(settings: RunSettings, run_dir: Path) -> str:
    """Write `run.json`; returns the id of the new run."""
    run_id = f"{NOT_A_NAME.sub('-', settings.environment)[:60]}-{secrets.token_hex(4)}"
    document = {"run": run_id, "settings": settings.model_dump(mode="json"), "began_at": clock.now()}
    write_document(run_dir / "run.json", document)
    return run_id


def read_run(run_dir: Path) -> dict[str, Any]:
    """What `run.json` says. Raises RunStopped if it is not there or not whole."""
    try:
        document: dict[str, Any] = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunStopped(f"there is no run in {run_dir}: {error}") from None
    return document
