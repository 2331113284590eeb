"""What happens to a day's sessions at 0.5, 1, 2 and 4 times the trainer's capacity, by the setting for it.

python -m bench.traffic [--loads 0.5 1 2 4] [--hours 24] [--swing 0.8] [--seed 0]

demand ─ admission (the gateway's arithmetic) ─▶ sessions ─▶ Intake (the trainer's code) ─▶ steps, verdicts

The clock is virtual, and a step is a wait of 8 minutes: there is no model, no Redis and no engine. Demand
swings over the day, `--swing` above and below its mean. Tasks differ in popularity (as 1, 1/2, 1/3, …) and in
the length of their sessions (1.6 to 32 minutes in the median, log-normal). A session samples by the version
that is served when it begins, and later by the one that is served when it ends. A group that admission
refuses does not come again."""

import argparse
from collections.abc import Sequence
from statistics import fmean

from bench.traffic.day import CHOICES, Day

HEAD = (
    *("load", "setting", "trained", "refused", "lost", "staleness: mean", "p95", "fairness"),
    "most that waited",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--swing", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    for cells in (HEAD, ("---",) * len(HEAD)):
        print(f"| {' | '.join(cells)} |")
    for load in asked.loads:
        for choice in CHOICES:
            found = Day(choice).run(load, asked.hours, asked.swing, asked.seed)
            shares = (f"{share:.0%}" for share in (found.trained, found.refused, found.lost))
            ages = (f"{fmean(found.staleness):.1f}", str(found.p95), f"{found.fairness:.2f}")
            cells = (f"{load:g}", choice.name, *shares, *ages, str(found.most_waiting))
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
