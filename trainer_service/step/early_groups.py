"""Accumulates gradients of groups before their optimizer step is full.

groups so far ─ remaining ─▶ new groups ─ learn ─▶ accumulated gradient ─▶ … ─▶ step, with the other groups
"""

from collections.abc import Collection, Sequence
from typing import Any

from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.rows.packing import packs_of
from trainer_service.step.memory_limit import OutOfMemory
from trainer_service.step.ranks import DistributedPolicy
from trainer_service.step.step_request import StepRequest

Fingerprint = tuple[Any, ...]
"""The rewards and the turns that a group is trained on. Equal fingerprints give equal gradients."""


class EarlyGroups:
    """The groups whose gradients are accumulated for the next step.

    The gradients are not durable: after a crash, the stream delivers their groups again.
    """

    def __init__(self, policy: DistributedPolicy) -> None:
        self._policy = policy
        self._learned: dict[Fingerprint, str] = {}
        """The group id of each fingerprint that is in the accumulated gradient."""
        self._is_over = False
        """Whether a group changed after its gradient was accumulated, or a pass did not fit into the memory.
        If so, `fills_a_pass` is false until the next step."""
        self.tokens = 0
        """Trained tokens in the accumulated gradient."""

    @property
    def group_ids(self) -> Collection[str]:
        return self._learned.values()

    def drop_if_changed(self, groups: Sequence[ScreenedGroup]) -> None:
        """Discard the accumulated gradient if one of its groups has other rewards or turns now, or is gone.

        `groups` are all groups that can be trained now.
        """
        if not self._learned.keys() <= {_fingerprint(judged) for judged in groups}:
            self._policy.discard_gradients()
            self._learned, self._is_over, self.tokens = {}, True, 0

    def discard(self) -> None:
        """Discard the accumulated gradient: the weights become others."""
        if self._learned:
            self._policy.discard_gradients()
        self._learned, self._is_over, self.tokens = {}, False, 0

    def remaining(self, groups: Sequence[ScreenedGroup]) -> list[ScreenedGroup]:
        """The groups that are not in the accumulated gradient."""
        return [judged for judged in groups if _fingerprint(judged) not in self._learned]

    def fills_a_pass(self, groups: Sequence[ScreenedGroup], algorithm: AlgorithmSettings) -> bool:
        """Whether the rows of these groups make a pass: as many micro-batches as the ranks compute at a time,
        and at least `max_tokens` tokens for each, where each shared prefix counts once."""
        planned = [row for judged in groups for row in judged.planned]
        ranks = self._policy.data_ranks
        fewest = ranks * algorithm.micro_batch_tokens
        if self._is_over or sum(len(row) for row in planned) < fewest:
            return False
        ids = [row.row().ids_L for row in planned]
        packs = packs_of(ids, algorithm.micro_batch_tokens, self._policy.shares_prefixes)
        return len(packs) >= ranks and sum(tree.tokens for pack in packs for tree in pack) >= fewest

    def learn(self, groups: Sequence[ScreenedGroup], request: StepRequest) -> None:
        """Add the gradient of `groups`. The request holds their rows, with advantages. After OutOfMemory,
        nothing is learned early for this step."""
        try:
            self._policy.accumulate(request)
        except OutOfMemory:
            self._learned, self._is_over, self.tokens = {}, True, 0
            raise
        self._learned |= {_fingerprint(judged): judged.group.group_id for judged in groups}
        self.tokens += sum(row.trained_tokens for row in request.rows)

    def step(self, groups: Sequence[ScreenedGroup], request: StepRequest) -> dict[str, float]:
        """Add the gradients of the remaining groups and make the step. The request holds the rows of all
        `groups`. Returns the step's metrics by name."""
        self.drop_if_changed(groups)
        remaining = {row.session_id for judged in self.remaining(groups) for row in judged.planned}
        early = self.tokens / sum(row.trained_tokens for row in request.rows)
        self._learned, self._is_over, self.tokens = {}, False, 0
        others = [row for row in request.rows if row.session_id in remaining]
        return self._policy.optimise(request.with_rows(others)) | {"early_frac": early}


def _fingerprint(judged: ScreenedGroup) -> Fingerprint:
    rollouts = tuple(
        (rollout.rollout_id, rollout.reward, *sorted(rollout.parts.items())) for rollout in judged.rollouts
    )
    return (rollouts, tuple(row.turn_ids for row in judged.planned))
