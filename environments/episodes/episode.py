"""One episode: opens its sessions, has it played, and tells the gateway how it ended."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.errors import SessionRefused
from environments.outcome import EpisodeOutcome
from environments.session_client import Patience, SessionClient
from environments.task import Task

SOURCE = "environment"
"""Where the rewards of turns come from, as recorded sessions say."""


@dataclass(frozen=True)
class Seat:
    """One agent's place in an episode: its session, its model and its sampling parameters. An opponent's seat
    is not rewarded."""

    session_id: str
    description: dict[str, Any]
    model: str
    sampling: dict[str, Any]
    learns: bool = True

    @property
    def is_pinned(self) -> bool:
        """Whether one version alone answers its calls, or one adapter."""
        return any(mark in self.model for mark in "@:")


Plays = Callable[[Task, Sequence[Seat], Sequence[Mapping[str, Any]]], Awaitable[list[EpisodeOutcome]]]
"""Plays an episode of the task in the open sessions of its seats. Returns the outcome for each seat."""


class EpisodePlayer:
    """Plays episodes in sessions. `plays` is who plays them: an agent loop, or a library."""

    def __init__(self, gateway: SessionClient, plays: Plays) -> None:
        self._gateway, self._plays = gateway, plays
        self.patience = Patience()
        """How long outcomes are told to a gateway that does not take them."""

    async def open(self, seats: Sequence[Seat]) -> list[dict[str, Any]]:
        """Open the sessions of an episode. The same seats get the same sessions again."""
        return [
            await self._gateway.open_session(seat.session_id, seat.description, self.patience)
            for seat in seats
        ]

    async def play(
        self, task: Task, seats: Sequence[Seat], sessions: Sequence[Mapping[str, Any]]
    ) -> list[EpisodeOutcome]:
        """Play an episode in its open sessions. Returns the outcome for each seat, which the gateway has
        stored. Raises GatewayFault if it failed and its version is served no more: so would all others."""
        outcomes = await self._plays(task, seats, sessions)
        if any(outcome.status == "failed" for outcome in outcomes):
            for model in {seat.model for seat in seats if seat.is_pinned}:
                await self._gateway.check_model(model)
        return await self._tell_all(seats, outcomes)

    async def abandon(self, seats: Sequence[Seat], reason: str) -> list[EpisodeOutcome]:
        """End an episode that nobody needs any more."""
        outcomes = [EpisodeOutcome("abandoned", reason=reason) for _ in seats]
        return await self._tell_all(seats, outcomes)

    async def _tell_all(
        self, seats: Sequence[Seat], outcomes: Sequence[EpisodeOutcome]
    ) -> list[EpisodeOutcome]:
        """Tell how each seat's episode ended; returns what was stored. Who is cancelled meanwhile has ended,
        too: it is told to the end, because a session has one outcome."""

        async def tell() -> list[EpisodeOutcome]:
            return [await self._tell(*each) for each in zip(seats, outcomes, strict=True)]

        telling = asyncio.create_task(tell())
        try:
            return await asyncio.shield(telling)
        except asyncio.CancelledError:
            return await telling

    async def _tell(self, seat: Seat, outcome: EpisodeOutcome) -> EpisodeOutcome:
        """Store the rewards of a seat that learns, then how its episode ended. The session's verdict needs
        both."""
        try:
            if seat.learns:
                await self._reward(seat.session_id, outcome)
            final = outcome.final if seat.learns else None
            await self._gateway.finish(seat.session_id, outcome.status, final, outcome.reason, self.patience)
        except SessionRefused as error:  # it has expired or was deleted; other episodes go on
            return EpisodeOutcome("failed", reason=str(error), turns=outcome.turns)
        return outcome

    async def _reward(self, session_id: str, outcome: EpisodeOutcome) -> None:
        for number, turn in enumerate(outcome.turn_rewards):
            key = f"turn-{number}"
            await self._gateway.reward(session_id, key, turn.value, turn.turn_id, SOURCE, self.patience)
        for named in outcome.named:
            await self._gateway.reward(session_id, named.name, named.value, None, named.source, self.patience)
