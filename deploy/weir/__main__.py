"""`weir`: everything on this machine, up and down; the demo; what runs; the configuration; the audit."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.settings import CONFIG_VARIABLE
from weir import status
from weir.configuration import effective_configuration
from weir.errors import StackError
from weir.stack import down as stopping
from weir.stack import state, supervisor
from weir.stack.settings import StackSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

DEMO_RUN_DIR = Path("run/demo")
DEMO_PORTS = {
    "gateway_port": 8010,
    "rollout_port": 8110,
    "engine_port": 30010,
    "trainer_port": 8210,
    "redis_port": 6390,
}
"""Where nothing else is set: beside a running `weir up`, and beside most of what a machine already has."""

Config = Annotated[
    Path | None, typer.Option("--config", help="weir.yaml to read", exists=True, dir_okay=False)
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="where the run keeps its files")]
Model = Annotated[Path | None, typer.Option("--model-path", help="Hugging Face directory to start from")]


@app.command()
def up(config: Config = None, run_dir: RunDir = None, model_path: Model = None) -> None:
    """Start everything in the background, and return when all of it is ready."""
    settings = _settings(config, run_dir=run_dir, model_path=model_path)
    running = state.read(settings.run_dir)
    if running and running.parent.process():
        console.print(f"already up, pid {running.parent.pid}: `weir status` says more")
        return
    if running and running.running():
        _say(stopping.stop(settings.run_dir, settings.stop_timeout_s))
    if settings.model_path is None:
        from weir.demo.settings import with_demo_model  # trains a tiny model the first time

        console.print("no model is named (WEIR_MODEL_PATH): taking the demo's", highlight=False)
        settings, _ = with_demo_model(settings, 0, console.print)
    child = supervisor.start_detached(settings)
    try:
        with console.status("starting") as spinner:
            found = supervisor.wait_up(child, settings, spinner.update)
    except KeyboardInterrupt:
        child.terminate()  # it stops what it has started so far
        child.wait()
        raise typer.Exit(130) from None
    for name, service in found.services.items():
        console.print(f"{name:16} {service.url}", highlight=False)


@app.command()
def down(config: Config = None, run_dir: RunDir = None) -> None:
    """Stop what `up` started, in order."""
    settings = _settings(config, run_dir=run_dir)
    _say(stopping.stop(settings.run_dir, settings.stop_timeout_s))


@app.command("status")
def show_status(config: Config = None, run_dir: RunDir = None) -> None:
    """What runs, where, and how it is; exits with 1 when something is down."""
    settings = _settings(config, run_dir=run_dir)
    found = state.read(settings.run_dir)
    if found is None or found.phase == "failed":
        errors.print(found.detail if found else f"nothing runs in {settings.run_dir}", markup=False)
        raise typer.Exit(1)
    rows = status.rows_of(found, next(iter(settings.admin_keys or settings.client_keys), None))
    console.print(status.table_of(rows))
    if not found.parent.process():
        errors.print(
            "the parent process is gone: nothing restarts a service that dies; `weir down` cleans up"
        )
    if not all(row.up for row in rows):
        raise typer.Exit(1)


@app.command("config")
def show_config(config: Config = None) -> None:
    """The complete effective configuration of all services, keys masked."""
    _use(config)
    typer.echo(effective_configuration(), nl=False)


@app.command()
def demo(
    seed: Annotated[int, typer.Option("--seed", help="of the model, the tasks and the sampling")] = 0,
    config: Config = None,
    run_dir: RunDir = None,
) -> None:
    """The whole loop in front of your eyes: a tiny model learns to use its tool."""
    from weir.demo.run import run  # its plots and its client are slow to import

    given = _settings(config, run_dir=run_dir or DEMO_RUN_DIR)
    own_ports = {name: port for name, port in DEMO_PORTS.items() if name not in given.model_fields_set}
    raise typer.Exit(run(given.model_copy(update=own_ports), seed))


@app.command("audit")
def show_audit(
    config: Config = None,
    run_dir: RunDir = None,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="JSONL of what clients heard success for: all of it must be there"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    redis_url: Annotated[
        str | None, typer.Option("--redis-url", help="of a Redis that is not the run's")
    ] = None,
    trainer_url: Annotated[str | None, typer.Option("--trainer-url", help="of a trainer elsewhere")] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option("--checkpoint-dir", help="the trainer's, read where it does not answer")
    ] = None,
) -> None:
    """Whether every turn is trained once, waiting, or closed; exits with 1 on anything lost or twice.

    Exits with 2 when the evidence cannot be read.
    """
    from weir.audit.audit import audit
    from weir.audit.evidence import read_answers
    from weir.audit.report import as_json as in_json
    from weir.audit.report import show
    from weir.audit.sources import sources_of

    try:
        sources = sources_of(_settings(config, run_dir=run_dir), redis_url, trainer_url, checkpoint_dir)
        report = audit(sources, read_answers(answers) if answers else [])
    except (StackError, ValidationError, yaml.YAMLError) as error:
        errors.print(f"weir: {error}", markup=False, highlight=False)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(in_json(report))
    else:
        show(report, console)
    raise typer.Exit(report.exit_code)


@app.command("import")
def import_sessions(
    files: Annotated[
        list[Path], typer.Argument(help="what GET /admin/export gave", exists=True, dir_okay=False)
    ],
    as_new: Annotated[
        str, typer.Option("--as-new", metavar="PREFIX", help="new ids: PREFIX and the old one")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="stop at the first refusal")] = False,
    config: Config = None,
    run_dir: RunDir = None,
    redis_url: Annotated[
        str | None, typer.Option("--redis-url", help="of a Redis that is not the run's")
    ] = None,
) -> None:
    """Exported sessions back into the queue, to be trained as if agents had just ended them."""
    from redis import Redis

    from weir.audit.sources import sources_of
    from weir.importing.run import import_files

    sources = sources_of(_settings(config, run_dir=run_dir), redis_url)
    with Redis.from_url(sources.redis_url) as redis:
        account = import_files(redis, files, as_new, strict, lambda why: errors.print(why, markup=False))
    _say(list(account.sentences()))
    if account.refused:
        raise typer.Exit(1)


def main() -> None:
    """One sentence for a failure that has one; a traceback is for bugs."""
    try:
        app()
    except (StackError, StorageUnavailable, ValidationError, yaml.YAMLError) as error:
        errors.print(f"weir: {error}", markup=False, highlight=False)
        sys.exit(1)


def _use(config: Path | None) -> None:
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config.absolute())  # every service inherits it


def _settings(config: Path | None, **flags: Path | None) -> StackSettings:
    _use(config)
    return StackSettings(**{name: value for name, value in flags.items() if value is not None})  # type: ignore[arg-type]


def _say(sentences: list[str]) -> None:
    for sentence in sentences:
        console.print(sentence, highlight=False)


if __name__ == "__main__":
    main()
