"""The program `weir`: decides in which Python environment a command runs.

packages are here (a checkout, weir-rl[all], Weir's own environment) ─▶ weir.__main__, in this process
else (`pip install weir-rl`, or uvx) ─▶ Weir's own environment, which is made first ─▶ the same command there

A wheel has the packages of the services in the folder `_services`, so that `weir` is the only name that it
brings. This module puts the folder on the path, also for the processes that a command starts. It imports only
the standard library, until it knows that the packages of commands are here.
"""

import os
import sys

from weir import installing

SERVICES = installing.PACKAGE / "_services"
NOT_YET = """\
Weir {version} trains a language model from the live traffic of agents.

  weir demo           a tiny model learns to use its tool, on this machine
  weir install        make Weir's Python environments now; -h shows the options
  weir service NAME   run one service in this terminal
  weir --version      print the release

The first other command makes Weir's Python environments in
{directory}, which takes some minutes. Then `weir --help` shows all commands.
"""


def main() -> None:
    """Run a command. An expected failure prints one sentence."""
    try:
        _run(sys.argv[1:])
    except installing.InstallationFailed as error:
        sys.exit(f"weir: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _run(arguments: list[str]) -> None:
    command = arguments[0] if arguments else "--help"
    if SERVICES.is_dir():
        _use_services()
    if command == "install":
        sys.exit(installing.install(arguments[1:]))
    if command == "service":
        installing.run_service(arguments[1:])
    if installing.are_here(installing.COMMANDS):
        if command in ("up", "demo") and not installing.engine_python().is_file():
            installing.installation().make(services=False)
        from weir.__main__ import main as run_here

        run_here()
        return
    if command in ("-h", "--help", "--version") and not (own := installing.installation()).python.exists():
        version = installing.installed().version
        text = NOT_YET.format(version=version, directory=own.directory)
        print(f"weir {version}" if command == "--version" else text.rstrip())
        return
    installing.become_own(arguments)


def _use_services() -> None:
    sys.path.insert(0, str(SERVICES))
    paths = [str(SERVICES), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


if __name__ == "__main__":
    main()
