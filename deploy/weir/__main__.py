"""Start and stop all services on this machine, show their state, run the demo, and audit recorded data."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from rollout_queue.config_file import CONFIG_VARIABLE, MalformedSettings, config_file
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.probe_routes import release
from rollout_queue.redis.settings import without_password
from weir import installing, status
from weir.configuration import check_configuration, effective_configuration, explained_configuration
from weir.env import app as env_commands
from weir.errors import StackError
from weir.installing import InstallationFailed
from weir.operations import add_commands
from weir.options import (
    STYLE,
    AsJson,
    Config,
    RedisUrl,
    RunDir,
    WrittenRedisUrl,
    gateway_of,
    redis_of,
    settings_from,
    settings_of_run,
    use,
)
from weir.stack import stack_control, stack_state, supervisor
from weir.stack.preflight import check_machine, check_place, check_ports
from weir.stack.run_keys import directory_of, of_run, variables, with_keys
from weir.stack.services import determined_sections, services_of
from weir.stack.settings import PYTHON, StackSettings, redis_access, service_field

app = typer.Typer(help=__doc__, **STYLE)
app.add_typer(env_commands, name="env")
add_commands(app)
console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

DEMO_RUN_DIR = Path("run/demo")
RealModel = Literal["smollm2"]
"""The models that `weir demo --model` can fetch."""
IMPORT_TIMEOUT_S = 60.0
"""How long Redis may take for one session."""
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For commands that read their arguments themselves."""
Model = Annotated[
    Path | None, typer.Option("--model-path", help="Hugging Face directory of the model to start from")
]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weir {release()}")
        raise typer.Exit


@app.callback()
def weir(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the release, and exit", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    """Options of `weir` itself; each command says with -h what it does."""


@app.command()
def up(config: Config = None, run_dir: RunDir = None, model_path: Model = None) -> None:
    """Start all services in the background, and return when they are ready."""
    settings = settings_from(config, run_dir=run_dir, model_path=model_path)
    of_demo, running = settings.model_path is None, stack_state.read(settings.run_dir)
    if running and running.parent.process():
        console.print(f"already up, pid {running.parent.pid}: see `weir status`")
        _say_what_to_do(settings, of_demo)
        return
    _say_configuration(settings)
    if running and running.running():
        _say(stack_control.stop(settings.run_dir, settings.stop_timeout_s))
    settings = _with_model(_checked(settings))
    check_machine(settings)
    child = supervisor.start_detached(settings)
    console.print(f"starting, for some minutes; logs: {settings.logs_dir}", highlight=False)
    try:
        with console.status("starting") as spinner:
            tell = spinner.update if console.is_terminal else lambda waiting: _say([f"waiting for {waiting}"])
            found = supervisor.wait_up(child, settings, tell)
    except KeyboardInterrupt:
        child.terminate()  # it stops the services that it has started
        child.wait()
        raise typer.Exit(130) from None
    for name, service in found.services.items():
        console.print(f"{name:16} {without_password(service.url)}", highlight=False)
    _say_what_to_do(settings, of_demo)


def _checked(settings: StackSettings) -> StackSettings:
    """The settings with keys, once this machine has what the services need beside a model: making or fetching
    one takes minutes. Raises StackError."""
    stack_state.own_run_dir(settings.run_dir)
    check_place(settings)
    settings = with_keys(settings)
    check_ports(services_of(settings))
    return settings


def _with_model(settings: StackSettings) -> StackSettings:
    """The settings with a model that is on this machine. Raises StackError."""
    if settings.model_path is None:
        from weir.demo.settings import with_demo_model  # trains a tiny model the first time

        console.print("WEIR_MODEL_PATH is not set: using the demo's model", highlight=False)
        return with_demo_model(settings, 0, console.print)[0]
    from weir.demo.real_demo import NAME, made_model
    from weir.models import on_this_machine

    path, say = settings.model_path, lambda line: _say([line])
    is_real_demos = str(path) == NAME and not path.exists()
    path = made_model(settings, say) if is_real_demos else on_this_machine(path, settings.models_dir, say)
    return settings.model_copy(update={"model_path": path})


@app.command("install", context_settings=PASSED_ON)
def install_environments(context: typer.Context) -> None:
    """Make Weir's Python environments, of a Weir that pip or uv has installed."""
    raise typer.Exit(installing.install(context.args))


@app.command("service", context_settings=PASSED_ON)
def run_service(context: typer.Context) -> None:
    """Run one service in this terminal, with its own options: `weir service gateway`."""
    installing.run_service(context.args)


@app.command()
def down(config: Config = None, run_dir: RunDir = None) -> None:
    """Stop the services that `up` started, in order."""
    settings = settings_from(config, run_dir=run_dir)
    _say(stack_control.stop(settings.run_dir, settings.stop_timeout_s))


@app.command("status")
def show_status(config: Config = None, run_dir: RunDir = None) -> None:
    """Show each service, its address and its state. Exits with 1 if a service is not ready.

    If `weir up` has started nothing, this shows the services that the gateway at WEIR_GATEWAY_URL reports.
    """
    settings = settings_of_run(config, run_dir)
    found = stack_state.read(settings.run_dir)
    admin_key = next(iter(settings.admin_keys or settings.client_keys), None)
    if found is None or found.phase == "failed":
        redis = redis_access(redis_of(settings, {}))
        rows = status.rows_elsewhere(gateway_of(settings, {}), redis, admin_key)
    else:
        rows = status.rows_of(found, admin_key)
    for line in status.lines_of(rows):
        console.print(line, highlight=False)
    if found is not None and not found.parent.process():
        errors.print("the parent process has ended, so no service is restarted; `weir down` stops the rest")
    if not all(row.up for row in rows):
        raise typer.Exit(1)


@app.command("config")
def show_config(
    config: Config = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each field changes.")] = False,
) -> None:
    """Print the effective configuration of all services, without keys and passwords."""
    _say_configuration(settings_from(config))
    if explain:
        typer.echo(explained_configuration())
    else:
        typer.echo(effective_configuration(), nl=False)


@app.command()
def demo(
    seed: Annotated[int, typer.Option("--seed", help="seed of the model, the tasks and the sampling")] = 0,
    model: Annotated[
        RealModel | None,
        typer.Option("--model", help="a model that others have trained, which learns to write JSON"),
    ] = None,
    config: Config = None,
    run_dir: RunDir = None,
) -> None:
    """Train a tiny model, or a real one (--model), on this machine, and show what it has learned."""
    use(config, own_file=False)
    from weir.demo.settings import on_own_ports

    settings = on_own_ports(settings_from(config, run_dir=run_dir or DEMO_RUN_DIR))
    if model is None:
        from weir.demo.run_demo import run  # slow to import, because of matplotlib and openai

        raise typer.Exit(run(settings, seed))
    from weir.demo.real_demo import run as run_real

    if not run_real(settings, seed, lambda line: console.print(line, highlight=False, markup=False)):
        raise typer.Exit(1)


@app.command()
def rewards(config: Config = None, run_dir: RunDir = None) -> None:
    """Run the reward service in this terminal: it rewards sessions of the gateway of `up`."""
    _run_here("reward_service", "rewards", settings_from(config, run_dir=run_dir))


@app.command("fine-tuning")
def fine_tuning(config: Config = None, run_dir: RunDir = None) -> None:
    """Run the service for fine-tuning jobs in this terminal: they train the policy of `up`."""
    _run_here("fine_tuning", "fine_tuning", settings_from(config, run_dir=run_dir))


@app.command("audit")
def show_audit(
    config: Config = None,
    run_dir: RunDir = None,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="JSONL file of what clients were told is stored; the audit checks it"),
    ] = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    trainer_url: Annotated[
        str | None, typer.Option("--trainer-url", help="trainer to ask, instead of the run's")
    ] = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option("--checkpoint-dir", help="the trainer's checkpoints, read if it does not answer"),
    ] = None,
) -> None:
    """Check that every turn was trained once, waits, or has a final verdict. Exits with 1 if not.

    Exits with 2 when Redis, the ledger or the answers cannot be read.
    """
    from weir.audit.audit import as_json as in_json
    from weir.audit.audit import audit, show
    from weir.audit.audit_sources import sources_of_run
    from weir.audit.evidence import read_answers

    try:
        sources = sources_of_run(config, run_dir, redis_url, trainer_url, checkpoint_dir)
        report = audit(sources, read_answers(answers) if answers else [])
    except (StackError, MalformedSettings) as error:
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
        list[Path], typer.Argument(help="files that GET /admin/export returned", exists=True, dir_okay=False)
    ],
    as_new: Annotated[str, typer.Option("--as-new", metavar="PREFIX", help="put PREFIX before all ids")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="stop at the first refusal")] = False,
    config: Config = None,
    run_dir: RunDir = None,
    redis_url: WrittenRedisUrl = None,
) -> None:
    """Write exported sessions back to the queue, to be trained as if agents had just finished them."""
    from rollout_queue.redis.redis_client import open_redis
    from weir.audit.audit_sources import sources_of_run
    from weir.importing import import_files

    sources = sources_of_run(config, run_dir, redis_url)
    with open_redis(sources.redis, IMPORT_TIMEOUT_S) as redis:
        account = import_files(redis, files, as_new, strict, lambda why: errors.print(why, markup=False))
    _say(list(account.sentences()))
    if account.refused:
        raise typer.Exit(1)


def main() -> None:
    """Run a command. An expected failure prints one sentence; only a bug prints a traceback."""
    try:
        app(prog_name="weir")
    except (StackError, StorageUnavailable, MalformedSettings, InstallationFailed, OSError) as error:
        errors.print(f"weir: {error}", markup=False, highlight=False)
        sys.exit(1)


def _run_here(module: str, section: str, settings: StackSettings) -> None:
    """Become the service, at the gateway of `up` and with its keys if its settings name no other."""
    url = service_field(section, "gateway_url")
    if url is None:
        os.environ["WEIR_GATEWAY_URL"] = f"http://127.0.0.1:{settings.gateway_port}"
    for name, value in variables(with_keys(settings) if url is None else of_run(settings, url)).items():
        os.environ[name] = value
        os.environ.pop(f"{name}_FILE", None)
    os.umask(0o077)
    os.execv(PYTHON, [PYTHON, "-m", module])  # noqa: S606 - our own command


def _say_configuration(settings: StackSettings) -> None:
    """Which file is read, and what in it or in the environment nobody reads. Raises MalformedSettings."""
    if (path := config_file()) is not None:
        errors.print(f"configuration: {path}", markup=False, highlight=False)
    elif os.environ.get(CONFIG_VARIABLE) is None and Path("weir.yml").is_file():
        raise MalformedSettings("weir.yml is not read: rename it to weir.yaml, or name it with --config")
    for sentence in check_configuration(settings):
        errors.print(f"warning: {sentence}", markup=False, highlight=False)


def _say_what_to_do(settings: StackSettings, of_demo: bool) -> None:
    """How agents and people reach what asks for keys, what to do next, also `of_demo`, with the demo's model,
    and where the trained model is."""
    gateway, directory = f"http://127.0.0.1:{settings.gateway_port}", directory_of(settings.run_dir)
    policies = determined_sections(settings)["trainer"]["policies_dir"]
    plays, example = "`weir.train` in Python, or `weir env run LIBRARY:NAME`,", Path("examples/tool_agent.py")
    if of_demo and example.is_file():
        plays = f"`.venv/bin/python {example}`"
    _say(
        [
            f"agents:  base_url {gateway}/v1, with the key in {directory}/client_keys",
            f"people:  open {gateway}/, and sign in with the key in {directory}/admin_keys",
            f"next:    {plays} plays episodes to learn from; `weir top` shows the training",
            f"model:   each trained version is a directory in {policies}; `weir export-model DIR` copies one",
        ]
    )


def _say(sentences: list[str]) -> None:
    for sentence in sentences:
        console.print(sentence, highlight=False)


if __name__ == "__main__":
    main()
