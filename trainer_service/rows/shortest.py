"""The smallest micro-batch: one row of two tokens, of which the second is trained."""

import numpy as np

from trainer_service.rows.rows import MicroBatch


def shortest() -> MicroBatch:
    """For a pass that is made only for what it does to the accumulated gradient."""
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    zero = np.zeros(1, np.float32)
    return MicroBatch(
        ids_N=np.zeros(2, np.int64),
        positions_N=np.arange(2),
        lengths_S=2 * one,
        parents_S=-one,
        predict_at_T=none,
        targets_T=none,
        logprobs_T=zero,
        advantages_T=zero,
        temperatures_T=np.ones(1, np.float32),
        versions_T=none,
        turns_T=none,
        rewards_T=zero,
        lp_teacher_T=None,
        rows_T=none,
    )
