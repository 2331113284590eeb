"""One group: the episodes of one task, played side by side, and ended early when they can teach nothing.
After a restart, a journal's groups that have not ended go on with the members that they lack.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from environments.environment import EpisodeOutcome, Task
from environments.episodes import EpisodePlayer, Seat, SeatPlan
from environments.errors import SessionRefused
from environments.results import Entry, EpisodeEnded, GroupBegun, Journal
from environments.session_client import SessionClient
from rollout_queue import clock

Result = TypeVar("Result")


async def to_the_end(work: Awaitable[Result]) -> Result:
    """The result of the work. Who is cancelled meanwhile waits for its end, and is cancelled then."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


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
        reads. Raises GatewayFault.
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


ENDED = ("waiting_reward", "finished")


@dataclass
class PlayedBefore:
    """What the journal of an earlier process says, entry by entry. Of groups that have ended it keeps
    nothing."""

    visit: int = 0
    """The first visit that is not drawn."""
    group: int = 0
    """The first number that no group has."""
    episodes: int = 0
    """Episodes that have ended."""
    left: dict[int, GroupBegun] = field(default_factory=dict)
    """The groups that have not ended, by number."""
    missing: dict[int, set[int]] = field(default_factory=dict)
    """Their members without an entry."""

    def add(self, entry: Entry) -> None:
        if isinstance(entry, GroupBegun):
            self.visit, self.group = max(self.visit, entry.visit + 1), max(self.group, entry.group + 1)
            self.left[entry.group], self.missing[entry.group] = entry, set(entry.members)
        elif entry.member in self.missing.get(entry.group, ()):  # each seat of a member has an entry
            self.episodes += 1
            self.missing[entry.group].remove(entry.member)
            if not self.missing[entry.group]:
                del self.left[entry.group], self.missing[entry.group]


async def unfinished_groups(
    gateway: SessionClient, plan: SeatPlan, journal: Journal, before: PlayedBefore
) -> tuple[list[GroupBegun], list[EpisodeEnded]]:
    """The groups to play again, each with the members that have not ended, and the outcomes that were found
    at the gateway. In training one episode alone is not played again: there is nothing to compare it with."""
    again: list[GroupBegun] = []
    found: list[EpisodeEnded] = []
    for begun in before.left.values():
        left: list[int] = []
        for member in sorted(before.missing[begun.group]):
            ended = await _outcomes(gateway, plan, begun, member)
            found += ended
            left += [] if ended else [member]
        if len(left) >= (2 if plan.settings.mode == "train" else 1):
            again.append(msgspec.structs.replace(begun, members=tuple(left), attempt=begun.attempt + 1))
        else:
            found += [_abandoned(plan, begun, member) for member in left]
    for each in found:
        journal.add(each)
    return again, found


def _abandoned(plan: SeatPlan, begun: GroupBegun, member: int) -> EpisodeEnded:
    """The entry of a member that is not played again."""
    seats = plan.seats(Task(begun.task_id, {}), begun.group, member, len(begun.members), begun.attempt)
    return EpisodeEnded(
        group=begun.group,
        member=member,
        seat=0,
        session_id=seats[0].session_id,
        task_id=begun.task_id,
        status="abandoned",
        reward=None,
        turns=0,
        seconds=0.0,
        ended_at=clock.now(),
        reason=STOPPED,
    )


async def _outcomes(
    gateway: SessionClient, plan: SeatPlan, begun: GroupBegun, member: int
) -> list[EpisodeEnded]:
    """How the member's sessions ended; none if it has to be played again. An open session is abandoned."""
    task = Task(begun.task_id, {})
    ended: list[EpisodeEnded] = []
    for place, seat in enumerate(plan.seats(task, begun.group, member, len(begun.members), begun.attempt)):
        session = await gateway.session(seat.session_id)
        if session is None or session["state"] == "open":
            with suppress(SessionRefused):  # it has expired meanwhile, was forgotten or deleted
                if session is None:  # the trainer waits for every session of a group
                    await gateway.open_session(seat.session_id, seat.description)
                await gateway.finish(seat.session_id, "abandoned", None, STOPPED)
        elif session["state"] in ENDED and seat.learns and session["status"]:
            ended.append(
                EpisodeEnded(
                    group=begun.group,
                    member=member,
                    seat=place,
                    session_id=seat.session_id,
                    task_id=begun.task_id,
                    status=session["status"],
                    reward=session["reward"],
                    turns=len(session["turns"]),
                    seconds=0.0,
                    ended_at=clock.now(),
                    reason=STOPPED if session["status"] == "abandoned" else None,
                )
            )
    return [] if any(each.status == "abandoned" for each in ended) else ended
