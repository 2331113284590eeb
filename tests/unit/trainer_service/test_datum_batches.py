"""The datums of a user's own loop are packed so that every target of every position is in one place."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hypothesis_profiles import examples
from trainer_service.commands.passes import DatumRow, datum_batches, places_of
from trainer_service.rows.packing import FEWEST_SHARED
from trainer_service.rows.rows import MicroBatch

quick = settings(max_examples=examples(60))
PROMPT = list(range(FEWEST_SHARED + 5))


def row(ids: Sequence[int], k: int, seed: int) -> DatumRow:
    targets_NK = np.random.default_rng(seed).integers(0, 1000, (len(ids), k))
    return DatumRow(np.array(ids), targets_NK, {})


@st.composite
def datums(draw: st.DrawFn) -> list[DatumRow]:
    """Datums of one to eight own tokens, of which some begin with the same prompt; some may be equal."""
    k = draw(st.integers(1, 3))
    own = st.lists(st.integers(0, 9), min_size=1, max_size=8)
    drawn = draw(st.lists(st.tuples(st.booleans(), own), min_size=1, max_size=6))
    return [row([*(PROMPT if shares else []), *ids], k, at) for at, (shares, ids) in enumerate(drawn)]


def targets_of(batch: MicroBatch) -> np.ndarray:
    first_T1 = batch.targets_T[:, None]
    return first_T1 if batch.teacher_top is None else np.hstack([first_T1, batch.teacher_top.ids_TK])


@quick
@given(datums(), st.integers(1, 120), st.booleans())
def test_every_target_is_predicted_once_at_its_own_position(
    rows: list[DatumRow], max_tokens: int, shares: bool
) -> None:
    lengths_R = np.array([len(each) for each in rows])
    wanted_TK = np.concatenate([each.targets_NK for each in rows])
    ids_T = np.concatenate([each.ids_N for each in rows])
    found_TK = np.full(wanted_TK.shape, -1)
    for batch in datum_batches(rows, max_tokens, shares):
        at_T = places_of(batch, lengths_R)
        assert (found_TK[at_T] == -1).all()
        found_TK[at_T] = targets_of(batch)
        assert (batch.ids_N[batch.predict_at_T] == ids_T[at_T]).all(), (
            "a position predicts from its own token"
        )
    assert (found_TK == wanted_TK).all()


def test_a_common_prompt_is_computed_once_and_its_targets_stay_those_of_each_datum() -> None:
    rows = [row([*PROMPT, 1, 2], 1, 1), row([*PROMPT, 3], 1, 2)]
    (shared,) = datum_batches(rows, 200, share_prefixes=True)
    assert len(shared.ids_N) == len(PROMPT) + 3
    assert len(shared.targets_T) == 2 * len(PROMPT) + 3
