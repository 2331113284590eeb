"""python -m tests.mutants sample|cover|run|table: which small faults in the product `make test` finds.

    sample  chooses mutants at random, and writes them into mutants.json
    cover   begins anew: runs the tests with coverage: which test runs which line of the mutants' modules, and
            what it costs; with --whole of all modules, which takes several times as long
    run     tries each mutant on the tests that run its line, first on the one that has found it in a former
            run, and writes what came of it; it goes on where it stopped
    table   prints the share that was found, package by package, then what survived, then the coverage if
            it is whole; and fails if a mutant survived that a former run has found

before.jsonl and after.jsonl have the results before and after the suite got its layers.

mutmut 3 and cosmic-ray 8 do not fit here. mutmut takes the name of a module from its path, and
rollout_queue is in `queue/`, which is no package; it leaves out properties and other decorated functions;
and it numbers the mutants of a function, so that its list of mutants says nothing about another commit.
cosmic-ray names them by line and column, and starts the whole command of the tests for each mutant: imports
and all tests each time.

Only functions are mutated: what a module does when it is imported, and the Lua scripts, are not. Only tests
that run the line in their own process are chosen.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.mutants.choosing import choose
from tests.mutants.covering import MODULES, PACKAGES, VARIABLE, Lines, costs
from tests.mutants.mutant import Mutant, find, read, sample, write
from tests.mutants.results import Outcome, Results, table_of_coverage, table_of_mutants
from tests.mutants.server import MutantServer

HERE = Path(__file__).parent
QUICK = "not long and not browser and not engine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["sample", "cover", "run", "table"])
    parser.add_argument(
        "tests", nargs="*", default=["tests/unit", "tests/service", "tests/process"], help="for cover"
    )
    parser.add_argument("--mutants", type=Path, default=HERE / "mutants.json")
    parser.add_argument("--results", type=Path, default=Path("run/mutants/results.jsonl"))
    parser.add_argument("--cover", type=Path, default=Path("run/mutants/cover"), help="what `cover` writes")
    parser.add_argument("--whole", action="store_true", help="cover all modules, and their branches")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", default="4")
    parser.add_argument(
        "--budget", type=float, default=20, metavar="SECONDS", help="of CPU time, for a mutant"
    )
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every n-th mutant, from the i-th on")
    parser.add_argument("--only", type=int, nargs="*", default=[], metavar="NUMBER")
    parser.add_argument(
        "--log", type=Path, default=Path(os.devnull), help="what pytest says about each mutant"
    )
    parser.add_argument("--marks", default=QUICK, metavar="EXPRESSION", help="which tests, as for pytest -m")
    parser.add_argument(
        "--former", type=Path, default=HERE / "after.jsonl", help="the results of a former run"
    )
    asked = parser.parse_args()
    if asked.what == "sample":
        write(asked.mutants, sample(Path.cwd(), asked.count, asked.seed))
    elif asked.what == "cover":
        cover(asked)
    elif asked.what == "run":
        run(asked)
    else:
        sys.exit(table(asked))


def cover(asked: argparse.Namespace) -> None:
    directory: Path = asked.cover
    directory.mkdir(parents=True, exist_ok=True)
    for left in [*directory.glob("coverage.*"), *directory.glob("costs.*")]:
        left.unlink()
    asked.results.unlink(missing_ok=True)
    (directory / MODULES).unlink(missing_ok=True)
    if not asked.whole:
        found = (find(Path.cwd(), each, PACKAGES) for each in of_shard(asked))
        modules = sorted({each.module for each in found if each is not None})
        (directory / MODULES).write_text("\n".join(modules), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.mutants.covering",
        "-m",
        asked.marks,
        *asked.tests,
    ]
    parallel = ["-n", asked.workers, "--no-loadscope-reorder"] if asked.workers != "0" else []
    sys.exit(subprocess.run([*command, *parallel], env=os.environ | {VARIABLE: str(directory)}).returncode)


def of_shard(asked: argparse.Namespace) -> list[Mutant]:
    shard, shards = map(int, asked.shard.split("/"))
    return read(asked.mutants)[shard::shards]


def run(asked: argparse.Namespace) -> None:
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    results = Results(asked.results)
    mutants = [each for each in of_shard(asked) if each.number not in results.outcomes]
    if asked.only:
        mutants = [each for each in mutants if each.number in asked.only]
    random.Random(0).shuffle(mutants)  # so that a part of a run says something about all packages

    def report(number: int, outcome: Outcome) -> None:
        results.add(number, outcome)
        print(
            f"{number} {outcome.status} {outcome.by} ({outcome.tests} tests, {outcome.cpu_s} s)", flush=True
        )

    tried = []
    former = Results(asked.former).outcomes
    lines, measured = Lines(Path.cwd(), asked.cover), costs(asked.cover)
    for mutant in mutants:
        found = find(Path.cwd(), mutant, PACKAGES)
        if found is None:
            report(mutant.number, Outcome("gone"))
            continue
        tests = lines.tests(found.module, found.change.lineno, found.change.end_lineno)
        chosen = choose(found.module, tests - {""}, measured, asked.budget)
        if mutant.number in former and (known := former[mutant.number].by) in tests:
            chosen = [known, *(test for test in chosen if test != known)]
        if chosen:
            tried.append((mutant.number, found, chosen))
        else:
            report(mutant.number, Outcome("not covered"))
    if not tried:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a child has no other threads than its first
    server = MutantServer(Path.cwd(), tried, report, asked.log)
    files = sorted({test.split("::")[0] for _, _, tests in tried for test in tests})
    sys.exit(
        pytest.main([*files, "-m", asked.marks, "-p", "no:cacheprovider", "--capture=sys"], plugins=[server])
    )


def table(asked: argparse.Namespace) -> str | None:
    """Print the tables. Return what is wrong."""
    results, former = Results(asked.results), Results(asked.former)
    print(table_of_mutants(read(asked.mutants), results))
    if asked.cover.is_dir() and not (asked.cover / MODULES).exists():
        with tempfile.TemporaryDirectory() as scratch:
            print(table_of_coverage(Path.cwd(), asked.cover, Path(scratch)))
    lost = results.lost_since(former)
    return f"found by {asked.former.name}, and no longer: {', '.join(map(str, lost))}" if lost else None


if __name__ == "__main__":
    main()
