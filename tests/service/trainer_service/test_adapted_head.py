"""An adapter of the output head: its part of the logits, its gradients, and models with and without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_queue.trainer_commands import (
    CommandFailed,
    LoadWeights,
    SaveForSampler,
    SaveWeights,
    WeightsLoaded,
)
from tests.support.tolerances import BFLOAT16, ulps
from tests.support.trainer_service.command_harness import (
    CommandHarness,
    MakeCommandHarness,
    created,
    learn,
    step,
)
from tests.support.trainer_service.device import DEVICE
from tests.support.trainer_service.head_gradients import gradients
from tests.support.trainer_service.model_families import Family, made
from tests.support.trainer_service.peft_models import peft_model
from tests.support.trainer_service.same_training import Weights, assert_moved_alike
from trainer_service.model import logprob_head
from trainer_service.model.logprob_head import (
    LogitTransform,
    LowRank,
    entropies,
    sampled_logprobs,
    selected_logprobs,
)
from trainer_service.storage.durable_files import write_file_list

pytestmark = pytest.mark.numeric
TOKENS, WIDTH, VOCABULARY, RANK = 37, 16, 501, 3
EXACT = 1e-5
"""How far log-probabilities and gradients may be from those of a plain model."""
GENTLE = step(0.2, eps=1.0)
"""With an epsilon of 1, a step is nearly one of gradient descent: there, rounding has a bound."""
FAMILIES = {
    "tied": Family("Qwen3", {"tie_word_embeddings": True}),
    "untied": Family("Llama", {"tie_word_embeddings": False}),
    "capped": Family("Gemma2", {"final_logit_softcapping": 2.0, "tie_word_embeddings": True}),
    "scaled": Family("Cohere", {"logit_scale": 3.0}),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens a chunk, so that there are several full chunks and a smaller one."""
    monkeypatch.setattr(logprob_head, "LOGITS_AT_ONCE", 10 * VOCABULARY)
    monkeypatch.setattr(logprob_head, "WEIGHTS_AT_ONCE", 100 * WIDTH)


def given(dtype: torch.dtype, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> list[Tensor]:
    """Hidden states, the head's weight, and the two factors of an adapter's part of the logits."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, WIDTH), (vocabulary, WIDTH), (tokens, RANK), (vocabulary, RANK))
    drawn = (torch.randn(each, generator=generator) / 2 for each in shapes)
    return [each.to(DEVICE, dtype).requires_grad_() for each in drawn]


def chunked(factors: list[Tensor], after: LogitTransform, entropy: bool = False) -> Tensor:
    hidden, weight, low, factor = factors
    targets_T = torch.arange(len(hidden), device=DEVICE) * 7 % len(weight)
    temperatures_T = torch.linspace(0.3, 1.5, len(hidden), device=DEVICE).to(
        torch.promote_types(hidden.dtype, torch.float32)
    )
    low_rank = LowRank(low, factor)
    return sampled_logprobs(hidden, weight, None, targets_T, temperatures_T, after, entropy, low_rank)


def plain(factors: list[Tensor], after: LogitTransform) -> Tensor:
    """The same from all logits at once, in float64."""
    hidden, weight, low, factor = (each.double() for each in factors)
    logits = (hidden @ weight.T + low @ factor.T) * after.scale
    if after.softcap is not None:
        logits = after.softcap * torch.tanh(logits / after.softcap)
    targets_T = torch.arange(len(hidden), device=DEVICE) * 7 % len(weight)
    temperatures_T = torch.linspace(0.3, 1.5, len(hidden), device=DEVICE)
    lp_T, _ = selected_logprobs(logits, targets_T, temperatures_T)
    return torch.stack([lp_T, entropies(logits, temperatures_T)], 1).float()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("after", [LogitTransform(), LogitTransform(scale=2.0), LogitTransform(softcap=0.7)])
def test_values_and_gradients_are_those_of_log_softmax(after: LogitTransform, entropy: bool) -> None:
    factors = given(torch.float32)
    ours, wanted = chunked(factors, after, entropy), plain(factors, after)
    # Roundings: WIDTH + RANK in a logit's products; 9 in the sum of 501 exponentials, added in pairs.
    allowed = ulps(WIDTH + RANK + 9, of=float(wanted.detach().abs().max()))
    torch.testing.assert_close(ours, wanted, atol=allowed, rtol=0)
    both = gradients(ours, factors, entropy), gradients(wanted, factors, entropy)
    for mine, other in zip(*both, strict=True):
        assert (mine - other).abs().max() < ulps(TOKENS, of=float(other.abs().max()))  # a sum over tokens


def test_the_gradients_are_those_of_finite_differences() -> None:
    factors = given(torch.float64, tokens=12, vocabulary=9)
    capped = LogitTransform(softcap=2.0)
    assert torch.autograd.gradcheck(lambda *each: chunked(list(each), capped, entropy=True), factors)


def test_half_precision_is_multiplied_into_float32() -> None:
    factors = given(torch.bfloat16)
    ours, wanted = chunked(factors, LogitTransform()), plain(factors, LogitTransform())
    allowed = ulps(WIDTH + RANK + 9, of=float(wanted.detach().abs().max()))
    torch.testing.assert_close(ours, wanted, atol=allowed, rtol=0)
    for mine, other in zip(gradients(ours, factors, False), gradients(wanted, factors, False), strict=True):
        assert (mine - other).abs().max() < ulps(1, of=float(other.abs().max()), unit=BFLOAT16)


class PlainAdapter:
    """The adapter of a model as PEFT reads it, over the base model of transformers, with torch's AdamW."""

    def __init__(self, harness: CommandHarness, model_id: str) -> None:
        harness.send(model_id, SaveForSampler("now"))
        written = harness.adapters[-1]
        store, _ = harness.store_of(written.name)
        path = store.path_of(written.version)
        self.model = peft_model(harness.settings.model_path, path, trainable=True)
        self._learns = [each for each in self.model.parameters() if each.requires_grad]
        rates: dict[str, Any] = {"lr": GENTLE.learning_rate, "betas": (0.9, 0.95), "eps": GENTLE.eps}
        self._optimizer = torch.optim.AdamW(self._learns, **rates, weight_decay=0.0)

    def learn(self, *seeds: int) -> list[Tensor]:
        """One step; returns the log-probabilities before it."""
        found = []
        for each in learn(*seeds).data:
            logits_NV = self.model(torch.tensor([list(each.tokens)])).logits[0]
            lp_N = torch.log_softmax(logits_NV, -1).gather(1, torch.tensor(list(each.targets))[:, None])[:, 0]
            loss = (-lp_N * torch.tensor(list(each.numbers["weights"]))).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(lp_N.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return found

    def weights(self) -> Weights:
        named = self.model.named_parameters()
        return {
            name.replace(".default.", "."): each.detach().clone() for name, each in named if "lora" in name
        }


@pytest.mark.parametrize("chosen", [{}, {"train_mlp": False, "train_attn": False}], ids=["all", "head-only"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_peft_and_torch(
    make_command_harness: MakeCommandHarness, tmp_path: Path, family: str, chosen: dict[str, bool]
) -> None:
    made(FAMILIES[family], tmp_path / "model")
    harness = make_command_harness(base=tmp_path / "model")
    harness.send("m", created(**chosen))
    plainly, before = PlainAdapter(harness, "m"), harness.weights("m")
    for seeds in ((1, 2), (3, 4), (5,)):
        wanted = plainly.learn(*seeds)
        passed = harness.passed("m", learn(*seeds))
        for mine, other in zip(passed.logprobs, wanted, strict=True):
            assert list(mine) == pytest.approx(other.tolist(), abs=EXACT)
        harness.send("m", GENTLE)
    after = harness.weights("m")
    assert_moved_alike(after, plainly.weights(), before)
    for factor in "AB":
        name = f"base_model.model.lm_head.lora_{factor}.weight"
        assert not torch.equal(after[name], before[name])


def test_a_head_that_cannot_have_an_adapter_is_refused(
    make_command_harness: MakeCommandHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.Qwen3ForCausalLM.get_output_embeddings", lambda model: None)
    harness = make_command_harness()
    refused = harness.send("m", created())
    assert isinstance(refused, CommandFailed)
    assert "train_unembed must be false" in refused.error
    assert not isinstance(harness.send("n", created(train_unembed=False)), CommandFailed)


def test_weights_of_an_older_build_adapt_no_head(
    make_command_harness: MakeCommandHarness, tmp_path: Path
) -> None:
    """It adapted no head, and its records say that it was asked for."""
    harness = make_command_harness()
    for command in (created(train_unembed=False), learn(1), step(), SaveWeights("x")):
        harness.send("m", command)
    (saved,) = (tmp_path / "run" / "checkpoints" / "saved").glob("*/x/*")
    record = (saved / "model.json").read_bytes()
    (saved / "model.json").write_bytes(record.replace(b'"train_unembed":false', b'"train_unembed":true'))
    (saved / "files.json").unlink()
    write_file_list(saved)
    assert harness.send("other", LoadWeights("m", "x", True)) == WeightsLoaded()
    assert harness.passed("other", learn(2)) == harness.passed("m", learn(2))
