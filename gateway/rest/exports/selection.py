"""Decides what other trainers get: sessions that have ended with a reward, and the turns to be trained."""

from typing import NamedTuple

from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.head import SessionHead, TrainedBranch
from rollout_queue.contract.records import Outcome, Verdict
from rollout_queue.contract.verdicts import OPENED_UNTRAINED, exclusion

HAS_IMAGES = Verdict(code="not_for_training", detail="its prompts show images, which the format cannot hold")
NOTHING_TRAINED = Verdict(code="not_for_training", detail="it has no turn that may be trained")


class TrainedSession(NamedTuple):
    """A session that trainers get."""

    head: SessionHead
    outcome: Outcome
    reward: float
    """The sum of all rewards of the session and its turns."""
    verdict: Verdict
    branches: tuple[TrainedBranch, ...]
    """At least one."""

    @property
    def group_id(self) -> str:
        """A session without a group is a group of its own."""
        return self.head.spec.group_id or self.head.spec.session_id

    @property
    def trained(self) -> frozenset[str]:
        """The ids of all turns that are trained."""
        return frozenset[str]().union(*(branch.trained for branch in self.branches))


def selected(head: SessionHead, verdict: Verdict, partial_groups: bool) -> TrainedSession | Verdict:
    """The session for trainers, or the verdict that says why they do not get it.

    `partial_groups`: also sessions whose group has members that have not ended.
    """
    outcome, reward = head.outcome, head.reward
    if outcome is None or reward is None or outcome.status in ("failed", "abandoned"):
        return verdict
    if not head.spec.train:
        return OPENED_UNTRAINED
    if verdict.code == "invalid" or (verdict.code == "group_incomplete" and not partial_groups):
        return verdict
    if any(turn.images for turn in head.turns):
        return HAS_IMAGES
    trainable = [turn.turn_id for turn in head.turns if exclusion(turn, head.orphans) is None]
    try:
        branches = tuple(head.trained_branches(trainable))
    except InvalidRecord as error:
        return Verdict(code="invalid", detail=str(error))
    return TrainedSession(head, outcome, reward, verdict, branches) if branches else NOTHING_TRAINED
