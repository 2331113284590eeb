"""How far a session or a group has come: whether it is open, waits for a reward, or is complete."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Outcome, SessionSpec

SessionStage = Literal["open", "waiting_reward", "ended", "decided"]
"""`open`: the session has no outcome. `waiting_reward`: it has ended, and a reward is still to come. `ended`:
it has ended, and needs no reward or has one. `decided`: it has a verdict."""


class SessionProgress(NamedTuple):
    """The stage of one session. `spec` is None if the session was deleted, was never opened or cannot be
    read."""

    session_id: str
    stage: SessionStage
    spec: SessionSpec | None = None
    outcome: Outcome | None = None
    readable: bool = True


class GroupProgress(NamedTuple):
    """The number of sessions that a group is made for, and how many have reached each stage."""

    size: int
    ended: int
    """Sessions that are `ended` or `decided`."""
    open: int = 0
    unrewarded: int = 0

    @property
    def missing(self) -> int:
        """How many sessions have not been opened yet."""
        return max(0, self.size - self.ended - self.open - self.unrewarded)

    @property
    def waiting_for(self) -> str:
        """What the group waits for, in words; empty when it is complete."""
        parts = [
            (self.open, "goes on", "go on"),
            (self.unrewarded, "waits for a reward", "wait for a reward"),
            (self.missing, "is not opened yet", "are not opened yet"),
        ]
        return ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in parts if count)


def group_progress(size: int | None, stages: Iterable[SessionStage]) -> GroupProgress:
    """Counts the stages of a group's sessions. If `size` is None, the group has no fixed size: then its
    size is the number of `stages`."""
    counted = list(stages)
    going, unrewarded = counted.count("open"), counted.count("waiting_reward")
    return GroupProgress(size or len(counted), len(counted) - going - unrewarded, going, unrewarded)


def stage_of(head: SessionHead) -> SessionStage:
    return stage(head.outcome, has_verdict=head.verdict is not None, has_reward=head.reward is not None)


def stage(outcome: Outcome | None, *, has_verdict: bool, has_reward: bool) -> SessionStage:
    if has_verdict:
        return "decided"
    if outcome is None:
        return "open"
    if has_reward or not outcome.train or outcome.status in ("failed", "abandoned"):
        return "ended"
    return "waiting_reward"
