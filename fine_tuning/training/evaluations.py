"""Which evaluation of a job is next. A directory of evaluations says it, so that a killed service loses none.

evals/12/run.json   begun at version 12        evals/12/ended   played, or failed
"""

from collections.abc import Sequence
from pathlib import Path


def unfinished_evaluations(directory: Path) -> list[int]:
    """The versions whose evaluations were begun and have not ended, the oldest first."""
    return [each for each in _begun(directory) if not (directory / str(each) / "ended").exists()]


def due_evaluation(directory: Path, versions: Sequence[int], interval: int) -> int | None:
    """The version of the evaluation that is to be played now: an unfinished one, or at the newest of the
    job's `versions` if these crossed a multiple of `interval` since the last one was begun."""
    if unfinished := unfinished_evaluations(directory):
        return unfinished[0]
    last = max(_begun(directory), default=0)
    before = sum(version <= last for version in versions)
    return max(versions) if len(versions) // interval > before // interval else None


def end_evaluation(directory: Path, version: int) -> None:
    """It is not played again."""
    place = directory / str(version)
    place.mkdir(parents=True, exist_ok=True)
    (place / "ended").touch()


def _begun(directory: Path) -> list[int]:
    return sorted(int(each.name) for each in directory.glob("*") if each.name.isdecimal())
