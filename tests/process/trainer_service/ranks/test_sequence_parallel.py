"""Two ranks that compute each micro-batch together learn what one rank learns alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_service.model_families import FAMILIES, Family, made
from tests.support.trainer_service.random_rows import POISON, MakeLearner, random_rows
from tests.support.trainer_service.rank_learning import learned_alike
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.rank_tasks import Told
from tests.support.trainer_service.related_rows import related_rows
from trainer_service.model.huggingface import load_model
from trainer_service.model.packed_attention import check_can_share, packing_of
from trainer_service.model.parallel import SequenceRanks
from trainer_service.rows.rows import micro_batches

pytestmark = pytest.mark.numeric  # processes start one after another

OPTIONS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in (0, 1, 2, 3)},
    "LoRA, recomputed": {"lora": {"rank": 4}, "activation_checkpointing": True},
    "critic, reference": {
        "zero_stage": 3,
        "critic": {},
        "algorithm": {"max_tokens": 200, "advantage": {"name": "gae"}, "kl": {"coefficient": 0.1}},
    },
    "whole step": {"algorithm": {"max_tokens": 200, "loss": {"name": "gspo"}, "epochs": 2}},
}
WINDOWS_AND_CAPS = next(family for family in FAMILIES if family.name == "Gemma2")


def learned(
    pair: RankPair, make_learner: MakeLearner, run: Path, options: dict[str, Any], **more: Any
) -> Told:
    # Packs of odd sizes; the third step has a token in one slice only, and the last an infinite gradient.
    steps = [related_rows(roots=1, branches=2, tips=2), random_rows(2, 8), random_rows(3, 1)]
    steps.append(random_rows(4, 5, POISON))
    both = {"algorithm": {"max_tokens": 200}} | options
    _, (told,) = learned_alike(pair, make_learner, run, steps, both, sliced=2, **more)
    return told


IN_SHORT = ("stage 1", "critic, reference", "whole step")
"""One case of each kind. The others take other ways to the same weights, and are in the long run."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in IN_SHORT else pytest.mark.long)
        for name, options in OPTIONS.items()
    ],
)
def test_two_ranks_learn_together_what_one_learns(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, options: dict[str, Any]
) -> None:
    probes = [random_rows(5, 3), random_rows(5, 3, POISON)]
    told = learned(pair, make_learner, tmp_path / "run", options, probes=probes)
    assert told.metrics[-1]["grad_norm"] == float("inf")
    assert told.sound == [True, False], "a gradient that is not finite is found in any slice"


def test_windows_and_caps_are_those_of_the_whole_row(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    made(WINDOWS_AND_CAPS, tmp_path / "model")
    learned(pair, make_learner, tmp_path / "run", {"model_path": tmp_path / "model"})


def test_the_slices_have_each_token_once_and_equal_sizes() -> None:
    (batch,) = micro_batches(random_rows(7, 3), 1000)
    parts = [SequenceRanks(4, index, None).slice_of(batch) for index in range(4)]
    ids = [each for part in parts for each in part.ids_N.tolist()]
    assert ids[: len(batch.ids_N)] == batch.ids_N.tolist()
    assert len(ids) - len(batch.ids_N) < 4
    assert len({len(part.ids_N) for part in parts}) == 1
    found = sorted(at for part in parts for at in part.at_T.tolist())
    assert found == list(range(len(batch.targets_T)))


@pytest.mark.parametrize(
    ("family", "ranks", "reason"),
    [
        (FAMILIES[0], 3, "3 ranks cannot share 4 heads with 2 heads of keys"),
        (next(each for each in FAMILIES if each.name == "Lfm2"), 2, "mixes tokens outside of attention"),
    ],
    ids=["heads", "convolutions"],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    family: Family, ranks: int, reason: str, tmp_path: Path
) -> None:
    made(family, tmp_path)
    model = load_model(tmp_path, torch.float32)
    with pytest.raises(SystemExit, match=reason):
        check_can_share(model, packing_of(model), ranks)


def test_ranks_that_no_group_has_are_refused(make_learner: MakeLearner) -> None:
    with pytest.raises(SystemExit, match="sequence_parallel: 2 does not divide the number of ranks, 1"):
        make_learner(sequence_parallel=2)


def test_each_rank_has_the_keys_of_its_queries() -> None:
    """Also if there are fewer heads of keys than ranks."""
    queries, keys = torch.arange(8), torch.arange(2)
    for index in range(4):
        ranks = SequenceRanks(4, index, None)
        (own_keys,) = ranks.own_heads(keys.repeat_interleave(2))
        assert {int(query) // 4 for query in ranks.own_heads(queries)} == {int(own_keys)}
