"""`weir env`: plays environments against a gateway, to train the model on them or to judge it."""

import asyncio
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from environments.errors import GatewayFault, RunStopped, UnknownEnvironment
from environments.intervals import judged
from environments.settings import Mode, RunSettings
from rollout_queue import clock
from weir.errors import StackError
from weir.options import STYLE, settings_from, settings_of_run, use
from weir.stack import stack_state

app = typer.Typer(help=__doc__, **STYLE)
console = Console(soft_wrap=True)

RUNS_DIR = Path("run/environments/runs")
DEMO_RUN_DIR = Path("run/env-demo")
Spec = Annotated[
    str, typer.Argument(help="LIBRARY:NAME, such as reasoning_gym:chain_sum or python:module:Class")
]
Pairs = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="NAME=VALUE for the environment; VALUE is JSON or a text"),
]
Sampling = Annotated[
    list[str] | None,
    typer.Option("--sampling", "-s", help="NAME=VALUE of chat completions, such as max_tokens=64"),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of any other field of the run's settings (docs/environments.md)"),
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="directory for what the run leaves")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in --run-dir")]
Loop = Annotated[str | None, typer.Option("--loop", help="MODULE:FUNCTION of an agent loop of your own")]
Gateway = Annotated[
    str | None,
    typer.Option("--gateway", help="its address; otherwise WEIR_GATEWAY_URL, or that of `weir up`"),
]
Seed = Annotated[int, typer.Option("--seed")]
Tasks = Annotated[int, typer.Option("--tasks", help="how many tasks; 0: a new one for each group")]
Concurrency = Annotated[int, typer.Option("--concurrency", help="how many episodes run at once")]


@app.command("run")
def run_training(
    environment: Spec,
    group_size: Annotated[int, typer.Option("--group-size", help="episodes of a task that are compared")] = 8,
    episodes: Annotated[int | None, typer.Option("--episodes", help="the run ends after so many")] = None,
    until_reward: Annotated[
        float | None, typer.Option("--until-reward", help="the run ends at this mean reward")
    ] = None,
    tasks: Tasks = 0,
    eval_every: Annotated[
        int, typer.Option("--eval-every", help="judge the model after so many new versions")
    ] = 0,
    concurrency: Concurrency = 32,
    seed: Seed = 0,
    option: Pairs = None,
    sampling: Sampling = None,
    settings: Set = None,
    loop: Loop = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    gateway: Gateway = None,
) -> None:
    """Play groups of episodes, from which the trainer learns."""
    given: dict[str, Any] = {
        "eval_every": eval_every,
        "episodes": episodes,
        "until_reward": until_reward,
        "tasks": tasks,
        "group_size": group_size,
    }
    given |= {"environment": environment, "mode": "train", "concurrency": concurrency, "seed": seed}
    _play(_settings(given, option, sampling, settings), run_dir, loop, resume, gateway)


@app.command("eval")
def run_evaluation(
    environment: Spec,
    model: Annotated[str | None, typer.Option("--model", help="policy@12 judges version 12")] = None,
    tasks: Tasks = 64,
    samples: Annotated[int, typer.Option("--samples", "-n", help="episodes of each task")] = 1,
    concurrency: Concurrency = 32,
    seed: Seed = 0,
    option: Pairs = None,
    sampling: Sampling = None,
    settings: Set = None,
    loop: Loop = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    gateway: Gateway = None,
) -> None:
    """Judge the model, or one of its versions. Nothing of it is trained."""
    given = {"environment": environment, "mode": "eval", "model": model, "tasks": tasks, "seed": seed}
    given |= {"group_size": samples, "concurrency": concurrency}
    _play(_settings(given, option, sampling, settings), run_dir, loop, resume, gateway)


@app.command("compare")
def compare_runs(
    one: Annotated[Path, typer.Argument(help="directory of an evaluation", exists=True, file_okay=False)],
    other: Annotated[Path, typer.Argument(help="directory of another one", exists=True, file_okay=False)],
) -> None:
    """Compare two evaluations task by task: the mean difference of their rewards, with its 95 % interval."""
    from environments.intervals import paired_difference
    from environments.results import each_episode, rewards_by_task

    one_rewards, other_rewards = (rewards_by_task(each_episode(run)) for run in (one, other))
    try:
        mean, low, high, tasks = paired_difference(one_rewards, other_rewards)
    except ValueError as error:
        raise StackError(str(error)) from None
    console.print(
        f"{other} minus {one}: {mean:+.4f} [{low:+.4f}, {high:+.4f}] over {tasks} tasks", highlight=False
    )


@app.command("demo")
def run_demo(seed: Seed = 0) -> None:
    """Train a tiny model on sums of reasoning-gym, on this machine, and judge it before and after."""
    from weir.demo.env_demo import run
    from weir.demo.settings import on_own_ports

    use(None, own_file=False)
    settings = on_own_ports(settings_from(None, run_dir=DEMO_RUN_DIR))
    if not run(settings, seed, lambda line: console.print(line, highlight=False)):
        raise typer.Exit(1)


def _play(
    settings: RunSettings, run_dir: Path | None, loop: str | None, resume: bool, gateway: str | None
) -> None:
    from environments.start_run import RunPlace, play_run, read_run

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if run_dir is None and resume:
        raise StackError("--resume needs --run-dir, the directory of the run that goes on")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", settings.environment)
    began = time.strftime("%Y%m%d-%H%M%S", time.localtime(clock.now()))
    run_dir = run_dir or RUNS_DIR / f"{name}-{settings.mode}-{began}"
    if settings.mode == "train" and settings.group_size == 1:
        console.print(
            "warning: an episode in a group of one is compared with no other, so by default none is trained: "
            "give --group-size 2 or more"
        )
    url, key = _gateway(gateway or os.environ.get("WEIR_GATEWAY_URL"))
    try:
        if resume:
            settings = _resumed(read_run(run_dir), settings)
        place = RunPlace(run_dir, url, key)
        summary = asyncio.run(
            play_run(settings, place, lambda line: console.print(line, highlight=False), loop, resume)
        )
    except (GatewayFault, RunStopped, UnknownEnvironment) as error:
        raise StackError(str(error)) from None
    except KeyboardInterrupt:
        console.print(f"stopped; `--resume --run-dir {run_dir}` goes on")
        raise typer.Exit(130) from None
    _show(summary)
    console.print(f"{run_dir / 'summary.json'}\n{run_dir / 'reward.png'}", highlight=False)


def _gateway(named: str | None) -> tuple[str, str | None]:
    """The gateway's address, and the client key for it: those of `weir up`, unless others are named. Raises
    StackError if nothing runs there."""
    settings = settings_of_run(None, None, named)
    found = stack_state.read(settings.run_dir)
    own = None if found is None else found.gateway_url
    url = (named or own or f"http://127.0.0.1:{settings.gateway_port}").rstrip("/")
    return url, next(iter(settings.client_keys), None)


def _resumed(document: dict[str, Any], now: RunSettings) -> RunSettings:
    """The settings of the run that goes on; only where it ends may change."""
    ends = {
        name: getattr(now, name)
        for name in ("episodes", "until_reward", "time_limit_s")
        if getattr(now, name)
    }
    return RunSettings(**(document["settings"] | ends))


def _settings(
    given: dict[str, Any], options: list[str] | None, sampling: list[str] | None, others: list[str] | None
) -> RunSettings:
    try:
        return RunSettings(
            **(given | {"options": _pairs(options), "sampling": _pairs(sampling)} | _pairs(others))
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise StackError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _pairs(given: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE, where VALUE is JSON, or else a text."""
    found: dict[str, Any] = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise StackError(f"{pair!r} is not NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _show(summary: dict[str, Any]) -> None:
    mode: Mode = summary["settings"]["mode"]
    table = Table(show_header=False, box=None)
    table.add_row("episodes", f"{summary['episodes']}, {summary['by_status']}")
    if mode == "train" and "reward_end" in summary:
        table.add_row("reward", f"{summary['reward_start']:.3f} → {summary['reward_end']:.3f}")
    if (groups := summary.get("groups")) and groups["compared"]:
        trained = "" if groups["different"] else ", so nothing was trained"
        table.add_row(
            "groups", f"{groups['different']} of {groups['compared']} had different rewards{trained}"
        )
    for name in ("reward", "pass_rate"):
        if isinstance(found := summary.get(name), dict):
            table.add_row(name, judged({"reward": found}))
    for k, value in summary.get("pass_at_k", {}).items():
        table.add_row(f"pass@{k}", f"{value:.4f}")
    if summary.get("versions"):
        table.add_row(
            "versions", ", ".join(f"{version}: {n} episodes" for version, n in summary["versions"].items())
        )
    for each in summary.get("evaluations", ()):
        table.add_row(f"evaluation at version {each['version']}", each.get("error") or judged(each))
    if notice := summary.get("notice"):
        table.add_row("training", notice)
    console.print(table)
