"""Splits the rows of a step into mini-batches, each of which makes an optimizer update of its own.

rows of a step ─ mini_batches ─▶ indices of each mini-batch ─ packed_rows ─▶ its micro-batches
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer_service.rows.rows import Ints, MicroBatch, Row, micro_batches


def mini_batches(rows: Sequence[Row], count: int) -> list[Ints]:
    """The indices of the rows of each mini-batch: consecutive groups, about as many in each. A step with
    fewer groups than mini-batches is split by rollouts, and one with fewer rollouts makes fewer
    mini-batches. All rows of a rollout are in one."""
    names: dict[str, int] = {}
    owners: list[str] = []
    for owners in ([row.group_id for row in rows], [row.session_id for row in rows]):
        names = {name: at for at, name in enumerate(dict.fromkeys(owners))}
        if len(names) >= count:
            break
    count = min(count, len(names))
    home_R = np.array([names[owner] * count // len(names) for owner in owners])
    return [np.flatnonzero(home_R == number) for number in range(count)]


def packed_rows(
    rows: Sequence[Row], at: Ints, max_tokens: int, share_prefixes: bool = False
) -> list[MicroBatch]:
    """The micro-batches of the rows at the indices `at`. Their rows are numbered over all `rows`."""
    packed = micro_batches([rows[index] for index in at], max_tokens, share_prefixes)
    return [replace(batch, rows_T=at[batch.rows_T]) for batch in packed]
