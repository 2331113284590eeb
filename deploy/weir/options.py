"""The options that most commands have, and the settings that they give."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout_queue.settings import CONFIG_VARIABLE, read_settings
from weir.stack.keys import of_run
from weir.stack.settings import StackSettings

Config = Annotated[
    Path | None, typer.Option("--config", help="weir.yaml to read", exists=True, dir_okay=False)
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="directory for the files of the run")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def use(config: Path | None) -> None:
    """Read this weir.yaml from now on, also in processes that this one starts."""
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config.absolute())  # the services inherit the variable


def settings_from(config: Path | None, **flags: Path | None) -> StackSettings:
    """The settings of the stack; what the flags give wins. Raises MalformedSettings."""
    use(config)
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    return read_settings(StackSettings, **given)


def settings_of_run(
    config: Path | None, run_dir: Path | None, gateway_url: str | None = None
) -> StackSettings:
    """The same with the keys of the services that run in the run directory."""
    return of_run(settings_from(config, run_dir=run_dir), gateway_url)
