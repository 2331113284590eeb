"""Goes on with a run that was stopped: what the journal lacks, the gateway knows.

An episode without an entry either ended, and its session says how; or it did not, and its session is
abandoned and the episode is played again in a new one. A half-played conversation cannot go on: its
environment is gone.
"""

from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from environments.episodes.seats import SeatPlan
from environments.errors import SessionRefused
from environments.results.journal import Entry, EpisodeEnded, GroupBegun, Journal
from environments.runs.group import STOPPED
from environments.session_client import SessionClient
from environments.task import Task
from rollout_queue import clock

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
