"""Has a library play episodes: it gets the sessions of an episode, and says afterwards what became of them.

session ids, task ──▶ host ──▶ library ──▶ its harness ──▶ calls of the sessions at the gateway
outcomes          ◀── traces with rewards by name ◀──┘
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from environments.episodes.episode import Seat
from environments.episodes.rollouts.judgement import outcome_of_trace
from environments.episodes.rollouts.traces import PlayedTraces
from environments.errors import EnvironmentFault
from environments.hosts.pool import HostedLibrary
from environments.outcome import EpisodeOutcome
from environments.task import Task
from rollout_queue import clock

Address = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
"""How the library reaches the model, from the sessions of an episode."""


class LibraryEpisodes:
    """Plays episodes of one library. `source` is what recorded sessions say of where rewards come from."""

    def __init__(
        self,
        library: HostedLibrary,
        address: Address,
        *,
        source: str,
        time_limit_s: float,
        graded_elsewhere: bool = False,
    ) -> None:
        self._library, self._address, self._source = library, address, source
        self._time_limit_s, self._graded_elsewhere = time_limit_s, graded_elsewhere

    async def play(
        self, task: Task, seats: Sequence[Seat], sessions: Sequence[Mapping[str, Any]]
    ) -> list[EpisodeOutcome]:
        given = {"data": task.data, "model": seats[0].model, "sampling": seats[0].sampling}
        try:
            async with clock.timeout(self._time_limit_s):
                said = await self._library.play(**given, **self._address(sessions))
            played = msgspec.convert(said, PlayedTraces)
        except TimeoutError:
            reason = f"the episode took longer than {self._time_limit_s:.0f} s"
            return [EpisodeOutcome("truncated", reason=reason) for _ in seats]
        except (EnvironmentFault, msgspec.ValidationError) as error:
            return [EpisodeOutcome("failed", reason=f"environment: {error}") for _ in seats]
        return [
            outcome_of_trace(played, seat.session_id, seat.learns, self._source, self._graded_elsewhere)
            for seat in seats
        ]


def one_address(url: str, key: str | None) -> Address:
    """The gateway's own address for all sessions: the library names the session in a header of each call."""

    def address(sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ids = [session["session_id"] for session in sessions]
        return {"sessions": ids, "base_url": f"{url}/v1", "api_key": key or "none"}

    return address


def own_addresses(sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The address and the key of each session."""
    return {
        "sessions": [
            {name: session[name] for name in ("session_id", "base_url", "api_key")} for session in sessions
        ]
    }
