"""python -m tests.soak --minutes 30: agents of all dialects, some calls hostile, while engines die and hang.

Gateways stand still meanwhile, and at the end Redis evicts keys.

It runs real gateways and a real Redis; the engines are fakes in processes of their own. The exit code is 1 if
something unexpected happened, if a gateway's memory grows, or if the audit has a finding. It is also 1 if the
soak shows nothing, because no agent used one of the dialects or one kind of fault was never made.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.soak.result import lines, write
from tests.soak.run import soak
from tests.support.tiny_model import make_tiny_model

AGENTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=None, help="default: run/soak/{seed}-{time}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    asked = parser.parse_args()
    run_dir: Path = asked.run_dir or Path("run/soak") / f"{asked.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    model = make_tiny_model(run_dir / "model")
    result = soak(run_dir, model, asked.minutes, asked.agents, asked.seed)
    if asked.json:
        write(result, asked.json)
    print("\n".join(lines(result)))
    print(f"seed {asked.seed}; all files are in {run_dir}")
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main()
