"""A library plays many episodes side by side in one host, and none of them outlives the need for it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from environments.errors import EnvironmentFault, HostDied
from environments.hosts import PROGRAMS, HostedLibrary, HostProcess
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until, wait_until_async

NO_ANSWER = f"did not answer 'ping' within {PATIENCE_S:.0f} s"
TOYS = Path(__file__).parents[2] / "support" / "environments"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").touch()
    return tmp_path / "notes"


def hosted(notes: Path) -> HostedLibrary:
    command = [sys.executable, str(PROGRAMS / "play.py"), "toy_library", str(notes)]
    return HostedLibrary(command, TOYS, 1, step_s=PATIENCE_S)


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


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of each question whether the host lives."""
    told, ask = list[str](), HostProcess.ask_process

    async def noted(host: HostProcess, *given: Any) -> None:
        told.append("asked")
        await ask(host, *given)
        told.append("answered")

    monkeypatch.setattr(HostProcess, "ask_process", noted)
    return told


async def hung(
    library: HostedLibrary, notes: Path, turned: TurnedClock, pings: list[str], others: int, how: str
) -> Any:
    """Play an episode that hangs beside others, and let time pass until each has asked in vain."""
    await asyncio.to_thread(wait_until, lambda: notes.read_text().split().count("waits") == others)
    playing = asyncio.create_task(library.play(how=how))
    await noted(notes, "hangs")
    await wait_until_async(lambda: len(turned.timers) == others + 1)
    turned.turn(PATIENCE_S)
    await wait_until_async(lambda: pings.count("asked") == others + 1)
    turned.turn(PATIENCE_S)
    return await playing


@pytest.mark.parametrize("how", ["hang", "hang in a task", "spin"])
async def test_an_episode_that_holds_the_others_up_fails_alone(
    turned: TurnedClock, library: HostedLibrary, notes: Path, pings: list[str], how: str
) -> None:
    others = [asyncio.create_task(library.play(how="wait")) for _ in range(3)]
    with pytest.raises(EnvironmentFault, match=NO_ANSWER):
        await hung(library, notes, turned, pings, 3, how)
    assert await library.play(how="right") == "right"
    assert not any(other.done() for other in others)
    assert library.ready(0).generation == 1, "no host was started anew"


async def test_a_host_that_cannot_be_interrupted_is_killed_and_its_episodes_have_failed(
    turned: TurnedClock, library: HostedLibrary, notes: Path, pings: list[str]
) -> None:
    other = asyncio.create_task(library.play(how="wait"))
    with pytest.raises(HostDied, match=NO_ANSWER):
        await hung(library, notes, turned, pings, 1, "hang outside Python")
    with pytest.raises(HostDied, match=NO_ANSWER):
        await other
    assert await library.play(how="right") == "right", "in a new host"


async def test_a_long_episode_is_no_hung_host(
    turned: TurnedClock, library: HostedLibrary, notes: Path, pings: list[str]
) -> None:
    playing = asyncio.create_task(library.play(how="wait"))
    await noted(notes, "waits")
    for number in range(3):
        await wait_until_async(lambda: turned.timers and pings.count("answered") == number)  # noqa: B023
        turned.turn(PATIENCE_S)
    await wait_until_async(lambda: pings.count("answered") == 3)
    assert not playing.done()
    playing.cancel()
    await asyncio.wait([playing])


async def test_a_library_is_stopped_with_its_episodes_when_the_run_ends(notes: Path) -> None:
    async with hosted(notes) as library:
        playing = asyncio.create_task(library.play(how="wait"))
        await noted(notes, "waits")
    with pytest.raises(HostDied):
        await playing
    await noted(notes, "stopped")
    await noted(notes, "cancelled")
