"""The options that most commands have, and what they give: the settings, and where the stack's parts are.

    settings_of_run ─▶ StackSettings ─┬─ gateway_of, redis_of, trainer_directory     an option wins over them
                                      └─▶ audit_sources.sources_of_run, targets.targets_of

An address is that of the services that run in the run directory; else that of the services' own settings (as
in a container); else the one that `weir up` would use. What nothing gives is a StackError, of which `weir`
prints the sentence.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from rollout_queue.config_file import CONFIG_VARIABLE
from rollout_queue.redis.settings import without_password
from rollout_queue.settings import read_settings
from weir.errors import StackError
from weir.stack import stack_state
from weir.stack.run_keys import of_run
from weir.stack.services import effective_sections
from weir.stack.settings import StackSettings, service_field

Config = Annotated[
    Path | None, typer.Option("--config", help="weir.yaml to read", exists=True, dir_okay=False)
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="directory for the files of the run")]
STYLE: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # rich's boxes show the type of each flag, as if it took a value
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""How all commands are shown."""
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
GatewayUrl = Annotated[str | None, typer.Option("--gateway-url", help="gateway to ask, instead of the run's")]
RedisUrl = Annotated[str | None, typer.Option("--redis-url", help="Redis to read, instead of the run's")]
WrittenRedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help="Redis to write to, instead of the run's")
]
CheckpointDir = Annotated[
    Path | None, typer.Option("--checkpoint-dir", help="the trainer's checkpoints, instead of the run's")
]
PoliciesDir = Annotated[
    Path | None, typer.Option("--policies-dir", help="the published versions, instead of the run's")
]


def use(config: Path | None, *, own_file: bool = True) -> None:
    """Read this weir.yaml from now on, also in processes that this one starts; without `own_file`, and if
    nobody names a file, none."""
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config.absolute())  # the services inherit the variable
    elif not own_file:
        os.environ.setdefault(CONFIG_VARIABLE, "")


def settings_from(config: Path | None, **flags: Path | None) -> StackSettings:
    """The settings of the stack; what the flags give wins. Raises MalformedSettings."""
    use(config)
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    return read_settings(StackSettings, **given)


def settings_of_run(config: Path | None, run_dir: Path | None, *named: str | None) -> StackSettings:
    """The same with the keys of the services that run in the run directory. Says on standard error which
    deployment the command looks at. `named` are addresses that the user gave, the gateway's first.

    Raises StackError if nothing runs in the run directory, and no address says where the services are.
    """
    settings = settings_from(config, run_dir=run_dir)
    aside = Console(stderr=True, soft_wrap=True)
    aside.print(f"looking at {place_of(settings, run_dir, *named)}", markup=False, highlight=False)
    return of_run(settings, next(iter(named), None))


def gateway_of(settings: StackSettings, running: Mapping[str, str]) -> str:
    """The address of the gateway; `running` has those of the services that run, by name."""
    known = running.get("gateway") or service_field("trainer", "gateway_url")
    return (known or f"http://127.0.0.1:{settings.gateway_port}").rstrip("/")


def redis_of(settings: StackSettings, running: Mapping[str, str]) -> str:
    """The URL of Redis."""
    return running.get("redis") or service_field("trainer", "redis_url") or settings.redis_url


def trainer_directory(
    settings: StackSettings, name: Literal["checkpoint_dir", "policies_dir"], given: Path | None = None
) -> Path:
    """A directory of the trainer: what an option has `given`, else that of the trainer's own settings."""
    own = service_field("trainer", name)
    return given or Path(own or effective_sections(settings)["trainer"][name])


def place_of(settings: StackSettings, run_dir: Path | None, *named: str | None) -> str:
    """What a command looks at, in words. Raises StackError if that is nothing."""
    elsewhere = [service_field("trainer", name) for name in ("gateway_url", "redis_url")]
    for gateway in (next(iter(named), None), elsewhere[0]):
        if gateway is not None and not gateway.startswith(("http://", "https://")):
            raise StackError(f"{gateway!r} is no address of a gateway: give http://HOST:PORT")
    if given := [without_password(each) for each in named if each]:
        return " and ".join(given)
    found = stack_state.read(settings.run_dir)
    if found is not None and found.services:
        return f"the stack in {settings.run_dir}, gateway {found.gateway_url or 'none'}"
    if run_dir is None and (set_by_variables := [without_password(each) for each in elsewhere if each]):
        return f"{' and '.join(set_by_variables)}, as the settings say"
    raise StackError(_nothing_there(settings.run_dir, found.detail if found is not None else ""))


def _nothing_there(run_dir: Path, last_start: str) -> str:
    if not run_dir.is_dir():
        return (
            f"there is no run in {run_dir}, which does not exist: start one with `weir up`, or name the "
            "directory of another one (--run-dir, WEIR_STACK__RUN_DIR)"
        )
    if last_start:
        return f"no services run in {run_dir}, because the last start failed: {last_start}"
    return (
        f"no services run in {run_dir}: start them with `weir up`, or name the directory of another run "
        "(--run-dir), or services that something else started (WEIR_GATEWAY_URL, WEIR_REDIS_URL)"
    )
