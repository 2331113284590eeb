"""A library plays many episodes side by side in one host, and none of them outlives the need for it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from environments.errors import EnvironmentFault, HostDied
from environments.hosts import PROGRAMS, HostedLibrary
from tests.support.waiting import PATIENCE_S, wait_until

TOYS = Path(__file__).parents[2] / "support" / "environments"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").touch()
    return tmp_path / "notes"


def hosted(notes: Path, step_s: float = PATIENCE_S) -> HostedLibrary:
    command = [sys.executable, str(PROGRAMS / "play.py"), "toy_library", str(notes)]
    return HostedLibrary(command, TOYS, 1, step_s=step_s)


@pytest.fixture
async def library(notes: Path) -> AsyncIterator[HostedLibrary]:
    async with hosted(notes) as library:
        yield library


async def noted(notes: Path, what: str) -> None:
    await asyncio.to_thread(wait_until, lambda: what in notes.read_text().split())


async def test_episodes_are_played_side_by_side(library: HostedLibrary) -> None:
    """Each of them waits for the other ones."""
    assert await asyncio.gather(*(library.play(how="meet") for _ in range(3))) == ["meet"] * 3


async def test_an_error_fails_its_episode_alone(library: HostedLibrary) -> None:
    other = asyncio.create_task(library.play(how="right"))
    with pytest.raises(EnvironmentFault, match="ValueError: the sandbox is gone"):
        await library.play(how="raise")
    assert await other == "right"


async def test_who_is_cancelled_cancels_the_episode_in_the_library(
    library: HostedLibrary, notes: Path
) -> None:
    playing = asyncio.create_task(library.play(how="wait"))
    await noted(notes, "waits")
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await noted(notes, "cancelled")
    assert await library.play(how="right") == "right", "the host lives"


@pytest.mark.parametrize("how", ["hang", "hang in a task", "spin"])
async def test_an_episode_that_holds_the_others_up_fails_alone(notes: Path, how: str) -> None:
    async with hosted(notes, step_s=1.0) as library:
        others = [asyncio.create_task(library.play(how="wait")) for _ in range(3)]
        await noted(notes, "waits")
        with pytest.raises(EnvironmentFault, match="did not answer 'ping' within 1 s"):
            await library.play(how=how)
        assert await library.play(how="right") == "right"
        assert not any(other.done() for other in others)
        assert library.ready(0).generation == 1, "no host was started anew"


async def test_a_host_that_cannot_be_interrupted_is_killed_and_its_episodes_have_failed(notes: Path) -> None:
    async with hosted(notes, step_s=1.0) as library:
        other = asyncio.create_task(library.play(how="wait"))
        await noted(notes, "waits")
        with pytest.raises(HostDied, match="did not answer 'ping' within 1 s"):
            await library.play(how="hang outside Python")
        with pytest.raises(HostDied, match="did not answer 'ping' within 1 s"):
            await other
        assert await library.play(how="right") == "right", "in a new host"


async def test_a_long_episode_is_no_hung_host(notes: Path) -> None:
    async with hosted(notes, step_s=1.0) as library:
        playing = asyncio.create_task(library.play(how="wait"))
        await noted(notes, "waits")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(playing, 3.0)  # three questions whether the host lives


async def test_a_library_is_stopped_with_its_episodes_when_the_run_ends(notes: Path) -> None:
    async with hosted(notes) as library:
        playing = asyncio.create_task(library.play(how="wait"))
        await noted(notes, "waits")
    with pytest.raises(HostDied):
        await playing
    await noted(notes, "stopped")
    await noted(notes, "cancelled")
