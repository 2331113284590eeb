"""The commands of day two: `weir doctor`, and those that keep a running deployment."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rollout_queue import clock
from weir.options import (
    AsJson,
    CheckpointDir,
    Config,
    GatewayUrl,
    PoliciesDir,
    RedisUrl,
    RunDir,
    WrittenRedisUrl,
    settings_from,
    settings_of_run,
    trainer_directory,
)
from weir.stack.run_keys import of_run
from weir.stack.settings import service_field

console = Console(soft_wrap=True)
FOLLOW_EVERY_S = 0.3
REQUEUE_TIMEOUT_S = 60.0


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("doctor")(doctor)
    app.command("backup")(backup)
    app.command("restore")(restore)
    app.command("top")(top)
    app.command("requeue")(requeue)
    app.command("logs")(logs)
    app.command("restart")(restart)
    app.command("export-model")(export_model)


def doctor(
    config: Config = None,
    run_dir: RunDir = None,
    gateway_url: GatewayUrl = None,
    redis_url: RedisUrl = None,
    patience_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=600, help="seconds that one service may take")
    ] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with this deployment, and what to do. Changes nothing; exits with 1 if something is.

    Asks every service at once, and those whose clock seems wrong a second time. What hangs costs the timeout.
    """
    from weir.doctor.doctor import examine, show
    from weir.doctor.targets import targets_of

    settings = settings_of_run(config, run_dir, gateway_url, redis_url)
    found = examine(targets_of(settings, gateway_url, redis_url, patience_s))
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        show(found, console)
    raise typer.Exit(found.exit_code)


def top(
    config: Config = None,
    run_dir: RunDir = None,
    gateway_url: GatewayUrl = None,
    once: Annotated[bool, typer.Option("--once", help="print the view once, and exit")] = False,
) -> None:
    """Show the fleet, versions, throughput and the last steps, every two seconds. `q` quits.

    Without a terminal, or with --once, the view is printed once; exits with 1 if no gateway answers.
    """
    from weir.doctor.targets import targets_of
    from weir.top import show_live, show_once

    targets = targets_of(settings_of_run(config, run_dir, gateway_url), gateway_url)
    if once or not (console.is_terminal and sys.stdin.isatty()):
        raise typer.Exit(0 if show_once(targets.gateway_url, targets.admin_key, console) else 1)
    try:
        show_live(targets.gateway_url, targets.admin_key, console)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def requeue(
    config: Config = None,
    run_dir: RunDir = None,
    redis_url: WrittenRedisUrl = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be done, and change nothing")
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="remove the records that cannot be trained any more")
    ] = False,
) -> None:
    """Put records that the trainer could not read (weir:dead) back into the stream, now that it can.

    Upgrade the trainer first. A run that was interrupted may be repeated; exits with 1 if records stay.
    """
    from rollout_queue.redis.record_restore import requeue as move
    from rollout_queue.redis.redis_client import open_redis
    from weir.audit.audit_sources import sources_of_run

    sources = sources_of_run(config, run_dir, redis_url)
    fates, why = Counter[str](), ""
    with open_redis(sources.redis, REQUEUE_TIMEOUT_S) as redis:
        for letter in move(redis, dry_run=dry_run, discard=discard):
            fates[letter.fate] += 1
            why = letter.why or why
    for sentence in _fates(fates, dry_run=dry_run, discard=discard, why=why):
        _say(sentence)
    left = fates["unreadable"] + (0 if discard else fates["decided"] + fates["gone"])
    raise typer.Exit(1 if left else 0)


def _fates(fates: Counter[str], *, dry_run: bool, discard: bool, why: str) -> Iterator[str]:
    would, removed = "would be" if dry_run else "were", "are kept (--discard removes them)"
    if discard:
        removed = "would be removed" if dry_run else "were removed"
    yield f"{fates['requeued']} records {would} put back into the stream"
    if fates["decided"]:
        yield (
            f"{fates['decided']} are of sessions that got their verdict without them, and {removed}; export "
            "such a session and import it as a new one to train it"
        )
    if fates["gone"]:
        yield f"{fates['gone']} are of sessions that were deleted or forgotten, and {removed}"
    if fates["unreadable"]:
        yield f"{fates['unreadable']} cannot be read by this build either, and are kept; the last: {why}"


def logs(
    service: Annotated[str | None, typer.Argument(help="one of them; without it, all")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="how many of its last lines")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with what is written")] = False,
    config: Config = None,
    run_dir: RunDir = None,
) -> None:
    """Print the end of the logs of `weir up`: of its services, of the engine, and of their supervisor."""
    from weir.stack.stack_control import logs_in

    def show(name: str, written: Iterable[str]) -> None:
        for line in written:
            typer.echo(line if service else f"{name:16} {line}")

    chosen = logs_in(settings_from(config, run_dir=run_dir).logs_dir, service)
    for name, log in chosen.items():
        show(name, log.last(lines))
    with suppress(KeyboardInterrupt):
        while follow:
            clock.pause(FOLLOW_EVERY_S)
            for name, log in chosen.items():
                show(name, log.new())


def restart(
    service: Annotated[str, typer.Argument(help="its name in `weir status`")],
    config: Config = None,
    run_dir: RunDir = None,
) -> None:
    """Stop one service of `weir up`, and wait until it is ready again. It keeps the settings that it had."""
    from weir.stack.stack_control import restart as again

    settings = settings_from(config, run_dir=run_dir)
    _say(f"{service} is ready again, pid {again(settings, service, _say)}")


def export_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new directory")],
    version: Annotated[
        int | None, typer.Option("--version", help="the one to copy; by default, the one that answers calls")
    ] = None,
    config: Config = None,
    run_dir: RunDir = None,
    policies_dir: PoliciesDir = None,
) -> None:
    """Copy a trained version as a directory that transformers loads (docs/your_model.md).

    Nothing needs to run. If nothing does, or the version that answers calls is not there any more, the newest
    one is copied. After a failure, nothing is left in DIR.
    """
    from weir.models import chosen, export, refuse_used, served_version

    refuse_used(directory)
    settings = of_run(settings_from(config, run_dir=run_dir))
    policies = trainer_directory(settings, "policies_dir", policies_dir)
    wanted = chosen(policies, version, served_version(settings) if version is None else None)
    _say(export(policies, wanted, directory).sentence)


def backup(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new directory")],
    config: Config = None,
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    checkpoint_dir: CheckpointDir = None,
    policies_dir: PoliciesDir = None,
    every_version: Annotated[
        bool, typer.Option("--all", help="copy every version on the disk, and not only those that are needed")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="have the trainer write a checkpoint first, which its steps wait for"),
    ] = False,
) -> None:
    """Copy Redis, the checkpoint and the policies as they are at one moment, while everything runs.

    Calls and training go on. The backup holds the data of users, the secret that signs session keys, and
    digests of API keys: only its owner may read its files.
    """
    from weir.audit.audit_sources import sources_of_run
    from weir.backup.backup import BackupPlan, back_up

    sources = sources_of_run(config, run_dir, redis_url, checkpoint_dir=checkpoint_dir)
    settings = settings_from(config, run_dir=run_dir)
    plan = BackupPlan(
        sources=sources,
        checkpoint_dir=sources.checkpoint_dir or Path("run/checkpoints"),
        policies_dir=trainer_directory(settings, "policies_dir", policies_dir),
        every_version=every_version,
        fresh=fresh,
    )
    began_at = clock.monotonic()
    back_up(plan, directory, _say)
    paused = "only for the checkpoint that you asked for" if fresh else "for no moment"
    _say(
        f"{directory} is a whole backup, made in {clock.monotonic() - began_at:.1f} s; training waited "
        f"{paused}"
    )


def restore(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a backup", exists=True, file_okay=False)],
    config: Config = None,
    run_dir: RunDir = None,
    redis_url: WrittenRedisUrl = None,
    checkpoint_dir: CheckpointDir = None,
    policies_dir: PoliciesDir = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="first remove what is in Redis and in the directories")
    ] = False,
) -> None:
    """Write a backup into an empty place: another run directory, other ports, another host.

    Stop all services there, except Redis. Without --redis-url, and if no Redis answers, that of `weir up`
    runs meanwhile.
    """
    from weir.backup.restore import RestoreTarget, redis_of_run
    from weir.backup.restore import restore as write

    settings = settings_from(config, run_dir=run_dir)
    with redis_of_run(settings, redis_url or service_field("trainer", "redis_url")) as url:
        target = RestoreTarget(
            redis_url=url,
            checkpoint_dir=trainer_directory(settings, "checkpoint_dir", checkpoint_dir),
            policies_dir=trainer_directory(settings, "policies_dir", policies_dir),
            replace=replace,
        )
        manifest = write(directory, target, _say)
    at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(manifest.taken_at))
    _say(f"restored what was there at {at}: start the services, and run `weir audit`")


def _say(sentence: str) -> None:
    console.print(sentence, markup=False, highlight=False)
