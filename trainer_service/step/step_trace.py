"""What the span of a step says: which turns it trained, and its main figures."""

from collections.abc import Iterator, Sequence

from rollout_queue.signals.tracing.spans import Value
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.rows.rows import Row

SHOWN = ("loss", "grad_norm", "entropy", "mismatch/abs_logp", "mismatch/kl")
"""The metrics that are attributes."""


def traces_of(groups: Sequence[ScreenedGroup]) -> Iterator[str]:
    """The spans that recorded the turns which these groups train, as far as they are traced."""
    for group in groups:
        for planned in group.planned:
            for turn in planned.branch:
                if turn.trace is not None and turn.turn_id in planned.turn_ids:
                    yield turn.trace


def step_attributes(
    groups: Sequence[ScreenedGroup], rows: Sequence[Row], version: int, values: object
) -> dict[str, Value | None]:
    """`values` are the step's metrics, if it was made. The rewards are those of the sessions in `groups`."""
    members = [member for screened in groups for member in screened.group.members]
    rewards = [member.reward for member in members if member.rewarded and member.reward is not None]
    metrics = values if isinstance(values, dict) else {}
    shown = {f"rl.{name.replace('/', '.')}": metrics.get(name) for name in SHOWN}
    return {
        "rl.policy.version": version,
        "rl.step.made": isinstance(values, dict),
        "rl.step.rows": len(rows),
        "rl.step.turns": sum(len(row.turn_ids) for row in rows),
        "rl.step.tokens": sum(row.trained_tokens for row in rows),
        "rl.reward_mean": sum(rewards) / len(rewards) if rewards else None,
        **shown,
    }
