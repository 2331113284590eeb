"""python -m tests.crash --kills 20 --seed 1: kill parts of the whole system, then audit it.

A window is a kind of moment at which a part is killed. The seed determines the order of the windows, the
pauses and the agents' behaviour, but not the timing of the processes. Two runs with one seed kill in the same
windows, not at the same instructions.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from rich.console import Console

from tests.crash.result import Kill, write
from tests.crash.run import crash, plan
from tests.crash.table import table
from tests.support.tiny_model import make_tiny_model
from weir.audit.audit import show
from weir.stack.settings import StackSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="windows whose title contains this")
    parser.add_argument(
        "--redis", choices=["single", "cluster"], default="single", help="one server, or six nodes"
    )
    parser.add_argument("--run-dir", type=Path, default=None, help="default: run/crash/{seed}-{time}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, for tests.crash.table")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for chatty in ("httpx", "weir"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    run_dir: Path = asked.run_dir or Path("run/crash") / f"{asked.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    model = make_tiny_model(run_dir / "model")
    windows = plan(asked.kills, asked.seed, asked.only, asked.redis)

    def told(kill: Kill) -> None:
        what = "" if kill.hit else " (missed the window)"
        logging.info("killed %s%s; well again after %.1f s", kill.title, what, kill.healed_s)

    run = crash(run_dir, model, StackSettings().engine_python, windows, asked.seed, told, asked.redis)
    if asked.json:
        write(run.result, asked.json)
    console = Console()
    console.print(table([run.result]), markup=False, highlight=False)
    console.print(f"the agents counted: {run.counts}", markup=False, highlight=False)
    if run.report is not None:
        show(run.report, console)
    if run.gave_up is not None:
        said = f"gave up after {len(run.kills)} of {asked.kills} kills: {run.gave_up}"
        console.print(said, markup=False, highlight=False)
    console.print(f"seed {asked.seed}; all files are in {run_dir}", markup=False, highlight=False)
    sys.exit(run.exit_code)


if __name__ == "__main__":
    main()
