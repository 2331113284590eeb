"""python -m tests.crash.table FILE…: the crash matrix as one table, over the results of several runs."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.crash.result import Result, read
from tests.crash.windows import WINDOWS

HEAD = (
    *("killed: moment", "kills", "at the moment", "after the moment was missed"),
    *("well again after s, median", "answers heard", "findings", "seeds"),
)


def table(results: Sequence[Result]) -> str:
    """A Markdown table. Only the last row has findings, because an audit covers a whole run."""
    done = {kill.title for result in results for kill in result.kills}
    ours = [window.title for window in WINDOWS]
    titles = [*(title for title in ours if title in done), *sorted(done.difference(ours))]
    rows = [HEAD, ("---",) * len(HEAD), *(_row(title, results) for title in titles), _last_row(results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(title: str, results: Sequence[Result]) -> tuple[str, ...]:
    kills = [kill for result in results for kill in result.kills if kill.title == title]
    healed = f"{statistics.median(kill.healed_s for kill in kills):.1f}"
    seeds = {result.seed for result in results for kill in result.kills if kill.title == title}
    answers = sum(kill.answers for kill in kills)
    return title, *_counted([kill.hit for kill in kills]), healed, str(answers), "", _listed(seeds)


def _last_row(results: Sequence[Result]) -> tuple[str, ...]:
    hits = [kill.hit for result in results for kill in result.kills]
    answers, findings = (sum(result.answers for result in results), sum(len(r.findings) for r in results))
    return "all", *_counted(hits), "", str(answers), str(findings), _listed({r.seed for r in results})


def _counted(hits: Sequence[bool]) -> tuple[str, str, str]:
    return str(len(hits)), str(sum(hits)), str(len(hits) - sum(hits))


def _listed(seeds: set[int]) -> str:
    return ", ".join(str(seed) for seed in sorted(seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="of `--json`")
    print(table([read(path) for path in parser.parse_args().results]))


if __name__ == "__main__":
    main()
