"""What a run keeps in memory does not grow with its episodes: the journal has them."""

from collections import deque
from pathlib import Path
from typing import Any

from environments.start import opened_run, source_of
from tests.support.environments.running import RunTest

TASKS = 4


def kept_by(whole: Any) -> int:
    """How many values a run keeps, in its own objects and in what they hold."""
    seen: dict[int, Any] = {}
    left = [whole]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset) or (
            isinstance(value, deque) and value.maxlen is None
        ):
            left += value
        elif type(value).__module__.startswith("environments."):
            names = getattr(value, "__struct_fields__", None) or vars(value)
            left += [getattr(value, name) for name in names]
    return len(seen)


async def kept_after(running: RunTest, directory: Path, episodes: int, resume: bool = False) -> int:
    settings = running.settings(
        "Double", group_size=2, tasks=TASKS, episodes=episodes, concurrency=4, skip_after=2
    )
    place = running.place_of(directory)
    async with opened_run(settings, place, source_of(settings, place), resume=resume) as (run, _):
        await run.play()
        assert run.figures.ended == episodes
        return kept_by(run)


async def test_a_run_keeps_no_more_after_many_episodes_than_after_few(
    running: RunTest, tmp_path: Path
) -> None:
    few = await kept_after(running, tmp_path / "few", 8)
    many = await kept_after(running, tmp_path / "many", 40)
    resumed = await kept_after(running, tmp_path / "many", 40, resume=True)
    assert max(many, resumed) <= few + 10, "a few numbers and texts may be other objects"
