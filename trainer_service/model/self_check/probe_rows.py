"""Random short rows, which are the same in each process."""

from typing import Any

import numpy as np

from trainer_service.rows.packing import FEWEST_SHARED
from trainer_service.rows.rows import Ints, Row

LENGTHS, SHARED = (24, 48, 48), FEWEST_SHARED + 4
"""Of the rows, and of the prefix that all but the first share, in tokens."""
TEMPERATURES = (1.0, 0.7, 1.0)
MOST_IDS = 50_000
FAR_TOKENS = 2
GROWING = {"dynamic", "longrope"}
"""The rotary embeddings whose frequencies depend on the largest position of a pass."""


def probe_rows(model: Any) -> list[Row]:
    """Rows of which all tokens but the first are trained."""
    config = model.config.get_text_config()
    most = min(model.get_input_embeddings().num_embeddings // 2, MOST_IDS)
    ids = np.setdiff1d(np.arange(most), _special(config))
    draw = np.random.default_rng(0)
    positions = getattr(config, "max_position_embeddings", None) or 0
    longest = min(max(LENGTHS), positions) if positions > 0 else max(LENGTHS)
    first, *others = (ids[draw.integers(0, len(ids), min(length, longest))] for length in LENGTHS)
    for each in others:
        each[:SHARED] = others[0][:SHARED]
    pairs = zip([first, *others], TEMPERATURES, strict=True)
    return [_row(ids_L, temperature) for ids_L, temperature in pairs]


def far_position(model: Any) -> int | None:
    """A position from which on the model's rotary embeddings have other frequencies; None if these do not
    depend on positions."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    growing = [each for each in kinds if each.get("rope_type") in GROWING]
    if not growing:
        return None
    bounds = [each.get("original_max_position_embeddings") or 0 for each in growing]
    return max(*bounds, int(config.max_position_embeddings))


def far_row() -> Row:
    """A row that a pass has only for its positions: none of its tokens is trained."""
    row = _row(np.full(FAR_TOKENS, 2), 1.0)
    row.mask_L[:] = 0
    return row


def _special(config: Any) -> list[int]:
    """Ids that a model may treat in another way than others, such as those that stand for an image."""
    named = [value for name, value in vars(config).items() if name.endswith(("token_id", "token_index"))]
    return [each for each in named if isinstance(each, int)]


def _row(ids_L: Ints, temperature: float) -> Row:
    length = len(ids_L)
    mask_L = np.ones(length, np.int64)
    mask_L[0] = 0
    zeros_L = np.zeros(length, np.float32)
    return Row(
        session_id="probe",
        turn_ids=("probe",),
        advantage=0.0,
        ids_L=ids_L.astype(np.int64),
        mask_L=mask_L,
        logprobs_L=zeros_L,
        versions_L=mask_L - 1,
        temperatures_L=np.full(length, temperature, np.float32),
        turns_L=mask_L - 1,
        rewards_L=zeros_L,
    )
