"""The rows of a session, made at once."""

from collections.abc import Iterable, Mapping, Sequence

from rollout_queue.contract.records import Turn
from trainer_service.rows.rows import Row, planned_rows


def rows_of(
    session_id: str,
    turns: Sequence[Turn],
    trainable: Iterable[str],
    rewards: Mapping[str | None, float] | None = None,
    group_id: str = "",
) -> list[Row]:
    return [planned.row() for planned in planned_rows(session_id, turns, trainable, rewards, group_id)]
