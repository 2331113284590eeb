"""What came of the mutants: a file with a line for each, and the tables that are made of it."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from coverage import Coverage, CoverageData

from tests.mutants.covering import PACKAGES
from tests.mutants.mutant import Mutant

FOUND = {"found", "timeout"}


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant."""

    status: str
    """found, survived, timeout, or why it was not tried: not covered, gone, not applied"""
    by: str = ""
    """The test that found it, or that did not end."""
    tests: int = 0
    cpu_s: float = 0.0


class Results:
    """The file of outcomes. A mutant that has a line in it is not tried again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[int, Outcome] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                number = fields.pop("number")
                self.outcomes[number] = Outcome(**fields)

    def add(self, number: int, outcome: Outcome) -> None:
        self.outcomes[number] = outcome
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"number": number, **asdict(outcome)}) + "\n")

    def lost_since(self, former: "Results") -> list[int]:
        """The mutants that a former run has found, and this one has not."""
        return sorted(
            number
            for number, outcome in self.outcomes.items()
            if outcome.status in ("survived", "not covered")
            and number in former.outcomes
            and former.outcomes[number].status in FOUND
        )


def table_of_mutants(mutants: Iterable[Mutant], results: Results) -> str:
    """How many mutants the tests found, room by room, and which survived."""
    rooms: dict[str, Counter[str]] = {}
    survivors = []
    for mutant in mutants:
        outcome = results.outcomes.get(mutant.number)
        if outcome is None:
            continue
        rooms.setdefault(mutant.room, Counter())[outcome.status] += 1
        if outcome.status not in FOUND:
            survivors.append(
                f"{mutant.number} {outcome.status}: {mutant.module} {mutant.function}, {mutant.operator}: "
                f"{mutant.before} → {mutant.after}"
            )
    rooms["all"] = sum(rooms.values(), Counter())
    lines = [
        "| package | mutants | found | survived | not covered | found, of those tried |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for room, counts in rooms.items():
        found = sum(counts[status] for status in FOUND)
        tried = found + counts["survived"] + counts["not covered"]
        share = f"{100 * found / tried:.1f} %" if tried else ""
        cells = (room, counts.total(), found, counts["survived"], counts["not covered"], share)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", *survivors])


def table_of_coverage(root: Path, directory: Path, scratch: Path) -> str:
    """Lines and branches that tests run in their own process, package by package."""
    merged = CoverageData(str(scratch / "merged"))
    for path in sorted(directory.glob("coverage.*")):
        data = CoverageData(str(path))
        data.read()
        merged.update(data)
    merged.write()
    report = scratch / "report.json"
    measured = Coverage(
        data_file=str(scratch / "merged"), branch=True, source=list(PACKAGES), config_file=False
    )
    measured.load()
    measured.json_report(outfile=str(report))
    rooms: dict[str, Counter[str]] = {}
    for name, file in json.loads(report.read_text(encoding="utf-8"))["files"].items():
        folder = Path(name).resolve().relative_to(root.resolve()).parent.as_posix()
        package = next((each for each in PACKAGES if f"{folder}/".startswith(f"{each}/")), folder)
        inside = folder.removeprefix(package).strip("/").split("/")[0]
        for room in dict.fromkeys((package, f"{package}/{inside}" if inside else package)):
            rooms.setdefault(room, Counter()).update(
                {
                    key: file["summary"][key]
                    for key in ("num_statements", "covered_lines", "num_branches", "covered_branches")
                }
            )
    lines = ["| package | lines | branches |", "|---|--:|--:|"]
    for room, counts in sorted(rooms.items()):
        lines.append(
            f"| {room} | {_share(counts['covered_lines'], counts['num_statements'])} "
            f"| {_share(counts['covered_branches'], counts['num_branches'])} |"
        )
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % of {whole}" if whole else ""
