"""One group: the episodes of one task, played side by side, and ended early when they can teach nothing."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.episodes.ending import to_the_end
from environments.episodes.episode import EpisodePlayer, Seat
from environments.episodes.seats import SeatPlan
from environments.outcome import EpisodeOutcome
from environments.results.journal import EpisodeEnded
from environments.task import Task
from rollout_queue import clock

Record = Callable[[EpisodeEnded], None]
TEACHES_NOTHING = "its group can teach nothing"
STOPPED = "the runner was stopped"


@dataclass
class EpisodeGroup:
    """`members` are the numbers of the episodes to play; they may be fewer than a whole group's after a
    resume.

    `stop_uniform_after` k ends the group once k episodes have equal rewards; 0 plays all of them. In training
    a group also ends when so many episodes have failed that no two are left to be compared.
    """

    number: int
    task: Task
    members: Sequence[int]
    attempt: int
    trains: bool
    stop_uniform_after: int = 0
    rewards: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    over: bool = False
    waiting: dict[int, list[Seat]] = field(default_factory=dict)
    """The seats of each member whose episode has not ended."""
    sessions: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """The sessions of each member, one for each seat."""

    async def open(self, player: EpisodePlayer, plan: SeatPlan) -> None:
        """Open all sessions before one can fail, because the trainer waits for every session of a group.

        Who is cancelled meanwhile waits for the answers: the gateway may open a session whose answer nobody
        hears. Raises GatewayFault.
        """
        size = len(self.members)
        for member in self.members:
            self.waiting[member] = plan.seats(self.task, self.number, member, size, self.attempt)
        opening = asyncio.gather(*map(player.open, self.waiting.values()), return_exceptions=True)
        opened = await to_the_end(opening)
        for member, sessions in zip(self.members, opened, strict=True):
            if isinstance(sessions, BaseException):
                raise sessions
            self.sessions[member] = sessions

    async def play(self, player: EpisodePlayer, slots: asyncio.Semaphore, record: Record) -> None:
        """Play each episode in a slot, and record its outcome. Raises GatewayFault."""
        running = {
            asyncio.create_task(self._episode(player, member, slots, record)) for member in self.members
        }
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
                self.over = self.teaches_nothing(len(running))
                if self.over:
                    break
        finally:
            for each in running:
                each.cancel()
            rest = await asyncio.gather(*running, return_exceptions=True)
        for error in rest:
            if isinstance(error, Exception):
                raise error

    async def abandon(self, player: EpisodePlayer) -> None:
        """End the episodes that have not ended, because the runner stops. A resumed run plays them again."""
        telling = (player.abandon(seats, STOPPED) for seats in self.waiting.values())
        await asyncio.gather(*telling, return_exceptions=True)

    def teaches_nothing(self, running: int) -> bool:
        alike = len(set(self.rewards)) == 1 and len(self.rewards) >= self.stop_uniform_after > 0
        alone = self.trains and bool(self.failures) and len(self.rewards) + running < 2
        return alike or alone

    async def _episode(
        self, player: EpisodePlayer, member: int, slots: asyncio.Semaphore, record: Record
    ) -> None:
        began, seats = clock.monotonic(), self.waiting[member]
        try:
            async with slots:
                began = clock.monotonic()
                outcomes = await player.play(self.task, seats, self.sessions[member])
        except asyncio.CancelledError:
            if not self.over:
                raise
            outcomes = await player.abandon(seats, TEACHES_NOTHING)
        del self.waiting[member]
        seconds = clock.monotonic() - began
        for place, (seat, outcome) in enumerate(zip(seats, outcomes, strict=True)):
            if seat.learns:
                record(self._entry(member, place, seat.session_id, outcome, seconds))
        self._count(next(each for seat, each in zip(seats, outcomes, strict=True) if seat.learns))

    def _count(self, outcome: EpisodeOutcome) -> None:
        if outcome.status == "failed":
            self.failures.append(outcome.reason or "")
        elif outcome.reward is not None:
            self.rewards.append(outcome.reward)

    def _entry(
        self, member: int, seat: int, session_id: str, outcome: EpisodeOutcome, seconds: float
    ) -> EpisodeEnded:
        return EpisodeEnded(
            group=self.number,
            member=member,
            seat=seat,
            session_id=session_id,
            task_id=self.task.id,
            status=outcome.status,
            reward=outcome.reward,
            turns=outcome.turns,
            seconds=round(seconds, 3),
            ended_at=clock.now(),
            reason=outcome.reason,
            metrics=outcome.metrics,
        )
