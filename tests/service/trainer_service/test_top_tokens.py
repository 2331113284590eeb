"""Distillation from a teacher's most probable tokens: what is asked, kept and learned."""

from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.support.trainer_service.harness import MakeHarness
from tests.support.trainer_service.random_rows import VOCABULARY, MakeLearner, taught
from trainer_service.model.head.sampled_logprobs import sampled_logprobs
from trainer_service.rows.rows import micro_batches

pytestmark = pytest.mark.numeric

TOP_K = 3
ALGORITHM: dict[str, Any] = {"loss": {"name": "forward_kl", "top_k": TOP_K}, "max_tokens": 64}
TEACHER = {"url": "http://teacher"}


def test_the_head_computes_log_p_of_several_targets_and_their_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((5, 8), (20, 8))
    )
    targets_TK = torch.randint(0, 20, (5, 4), generator=generator)
    targets_TK[:, 1] = targets_TK[:, 0]  # the sampled token may be among the most probable ones
    temperatures_T = torch.linspace(0.5, 1.5, 5).double()
    slope_TK = torch.randn((5, 4), generator=generator, dtype=torch.float64)
    ours_TK = sampled_logprobs(hidden, weight, None, targets_TK, temperatures_T)[:, :-1]
    plain_TK = ((hidden @ weight.T) / temperatures_T[:, None]).log_softmax(1).gather(1, targets_TK)
    torch.testing.assert_close(ours_TK, plain_TK)
    pairs = zip(
        torch.autograd.grad((ours_TK * slope_TK).sum(), (hidden, weight)),
        torch.autograd.grad((plain_TK * slope_TK).sum(), (hidden, weight)),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_a_pass_scores_the_tokens_of_each_place_in_any_packing(make_learner: MakeLearner) -> None:
    rows, policy = taught(1, 5, TOP_K), make_learner(algorithm=ALGORITHM, teacher=TEACHER).policy
    (whole,) = micro_batches(rows, 1000)
    order = np.argsort(whole.rows_T, kind="stable")
    together = policy.scores(whole).top_TK
    assert together is not None
    apart = [policy.scores(batch).top_TK for row in rows for batch in micro_batches([row], 1)]
    torch.testing.assert_close(
        together.detach()[order], torch.cat([each.detach() for each in apart if each is not None])
    )


class TopTeacher:
    """A teacher that tells the same most probable tokens at each place."""

    def __init__(self, top: list[Any]) -> None:
        self.top = top
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        asked = httpx.Response(200, content=request.content).json()
        self.asked.append(asked)
        ids = asked["input_ids"][asked["logprob_start_len"] :]
        own = [[None, ids[0], None], *([-1.0, token, None] for token in ids[1:])]
        told = {"input_token_logprobs": own, "input_top_logprobs": [None, *[self.top] * (len(ids) - 1)]}
        return httpx.Response(200, json={"meta_info": told})


def test_the_policy_takes_over_the_teachers_distribution(make_harness: MakeHarness) -> None:
    top = [[float(np.log(p)), token, None] for p, token in ((0.6, 40), (0.3, 41), (0.05, 42))]
    algorithm = ALGORITHM | {"min_live_rows": 1, "max_staleness": 100}
    harness = make_harness(
        algorithm=algorithm,
        teacher=TEACHER,
        optimizer={"lr": 2e-2, "warmup_steps": 0},
        guards={"max_abs_logp": None, "max_kl": None},
    )
    harness.teacher = teacher = TopTeacher(top)
    harness.start()
    losses = []
    for step in range(25):
        harness.agents.episode(f"s{step}", 0.0)
        assert harness.trainer.run_once()
        losses.append(harness.shared_state.snapshot.metrics["loss"])
    assert teacher.asked[0]["top_logprobs_num"] == TOP_K
    assert losses[-1] < 0.1 < 1 < losses[0]


@pytest.mark.parametrize(
    "top",
    [
        None,
        [],
        [[-0.1, 5, None]],
        [[-0.1, "x", None]] * 3,
        [[-0.1, VOCABULARY, None]] * 3,
        [[-0.1, 2**40, None]] * 3,
        [["nan", 5, None]] * 3,
        [[1e99, 5, None]] * 3,
    ],
    ids=str,
)
def test_a_session_without_the_tokens_that_were_asked_is_invalid(top: Any, make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm=ALGORITHM | {"min_live_rows": 1}, teacher=TEACHER)
    harness.teacher = TopTeacher(top)
    harness.start()
    harness.agents.episode("a", 0.0)
    assert not harness.trainer.run_once()
    assert harness.session_codes() == {"a": "invalid"}
    verdict = harness.stream.heads["a"].verdict
    assert verdict is not None
    assert "did not tell its 3 most probable tokens" in verdict.detail
