"""The chunked head gives the log p, entropies and gradients of the plain computation with far less memory."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.tolerances import BFLOAT16, FLOAT64, ulps
from tests.support.trainer_service.device import DEVICE
from tests.support.trainer_service.head_gradients import gradients
from tests.support.trainer_service.model_families import FAMILIES, Family, made
from tests.support.trainer_service.random_rows import row_of
from trainer_service.model import logprob_head
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.logprob_head import (
    BYTES_OF_A_LOGIT,
    LogitTransform,
    LogprobHead,
    entropies,
    logits_at_once,
    sampled_logprobs,
    selected_logprobs,
)
from trainer_service.model.packed_attention import packing_of
from trainer_service.rows.rows import micro_batches

pytestmark = pytest.mark.numeric

TOKENS, WIDTH, VOCABULARY = 37, 16, 501
RESHAPINGS = [
    LogitTransform(),
    LogitTransform(scale=0.0625),
    LogitTransform(scale=2.0),
    LogitTransform(softcap=0.7),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens a chunk, so that there are several full chunks and a smaller one."""
    monkeypatch.setattr(logprob_head, "LOGITS_AT_ONCE", 10 * VOCABULARY)
    monkeypatch.setattr(logprob_head, "WEIGHTS_AT_ONCE", 100 * WIDTH)


def given(dtype: torch.dtype, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> list[Tensor]:
    """Hidden states, weight, bias, targets and temperatures."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, WIDTH), (vocabulary, WIDTH), (vocabulary,))
    floats = [(torch.randn(shape, generator=generator) / 2).to(dtype).requires_grad_() for shape in shapes]
    targets_T = torch.randint(0, vocabulary, (tokens,), generator=generator)
    made = [*floats, targets_T, torch.linspace(0.3, 1.5, tokens)]
    return [each.detach().to(DEVICE).requires_grad_(each.requires_grad) for each in made]


def plainly(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets_T: Tensor,
    temperatures_T: Tensor,
    after: LogitTransform,
) -> Tensor:
    """The plain computation from all logits at once, in float64."""
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double()) * after.scale
    if after.softcap is not None:
        logits = after.softcap * torch.tanh(logits / after.softcap)
    lp_T, _ = selected_logprobs(logits, targets_T, temperatures_T)
    return torch.stack([lp_T, entropies(logits, temperatures_T)], 1).float()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("after", RESHAPINGS)
def test_values_and_gradients_are_those_of_log_softmax(after: LogitTransform, with_entropy: bool) -> None:
    hidden, weight, bias, targets_T, temperatures_T = given(torch.float32)
    ours = sampled_logprobs(hidden, weight, bias, targets_T, temperatures_T, after, with_entropy)
    plain = plainly(hidden, weight, bias, targets_T, temperatures_T, after)
    # Roundings: WIDTH in a logit's products; 9 in the sum of 501 exponentials, added in pairs (2^9 > 501).
    allowed = ulps(WIDTH + 9, of=float(plain.detach().abs().max()))
    torch.testing.assert_close(ours, plain, atol=allowed, rtol=0)
    inputs = [hidden, weight, bias]
    pairs = zip(gradients(ours, inputs, with_entropy), gradients(plain, inputs, with_entropy), strict=True)
    for mine, other in pairs:
        assert (mine - other).abs().max() < ulps(TOKENS, of=float(other.abs().max()))  # a sum over tokens


@pytest.mark.parametrize("way", ["head", "cut head", "logits"])
def test_ids_without_probability_add_nothing_and_get_no_gradient(way: str) -> None:
    """Some rows of the head pad the vocabulary: their bias is -inf, or the model cuts off their logits."""
    kept = 2 * VOCABULARY // 3
    hidden, weight, bias, targets_T, temperatures_T = given(torch.float64)
    targets_T, leaves = targets_T % kept, [hidden, weight, bias]
    padding_V = torch.arange(VOCABULARY, device=DEVICE) >= kept
    masked_V = bias if way == "cut head" else bias.masked_fill(padding_V, -torch.inf)
    temperatures_T = temperatures_T.double()
    if way == "logits":
        logits_TV = torch.nn.functional.linear(hidden, weight, masked_V)
        lp_T, entropy_T = selected_logprobs(logits_TV, targets_T, temperatures_T)
        differentiable_T = entropies(logits_TV, temperatures_T)
        assert torch.equal(entropy_T, differentiable_T)
        ours = torch.stack([lp_T, differentiable_T], 1)
    else:
        after = LogitTransform(columns=kept if way == "cut head" else None)
        ours = sampled_logprobs(hidden, weight, masked_V, targets_T, temperatures_T, after, True)
    logits_TV = torch.nn.functional.linear(hidden, weight, bias)[:, :kept]
    lp_TV = (logits_TV / temperatures_T[:, None]).log_softmax(1)
    lp_T = lp_TV.gather(1, targets_T[:, None])[:, 0]
    plain = torch.stack([lp_T, -(lp_TV.exp() * lp_TV).sum(1)], 1)
    allowed = ulps(WIDTH + 9 + TOKENS, of=float(plain.detach().abs().max()), unit=FLOAT64)
    torch.testing.assert_close(ours, plain, atol=allowed, rtol=0)
    slope_T2 = torch.randn(plain.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = (torch.autograd.grad((each * slope_T2.to(DEVICE)).sum(), leaves) for each in (ours, plain))
    for mine, other in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, other, atol=allowed, rtol=0)


def test_half_precision_is_multiplied_into_float32() -> None:
    """The gradient of the logits is rounded to bfloat16 before it is multiplied, by at most 2^-8 each.

    The test allows 2^-7.
    """
    hidden, weight, bias, targets_T, temperatures_T = given(torch.bfloat16)
    ours = sampled_logprobs(hidden, weight, bias, targets_T, temperatures_T)
    plain = plainly(hidden, weight, bias, targets_T, temperatures_T, LogitTransform())
    assert ours.dtype == torch.float32
    allowed = ulps(WIDTH + 9, of=float(plain.detach().abs().max()))
    torch.testing.assert_close(ours, plain, atol=allowed, rtol=0)
    inputs = [hidden, weight, bias]
    for mine, other in zip(gradients(ours, inputs, False), gradients(plain, inputs, False), strict=True):
        assert (mine - other).abs().max() < ulps(1, of=float(other.abs().max()), unit=BFLOAT16)


def test_a_frozen_head_gets_no_gradient_but_the_hidden_states_do() -> None:
    hidden, weight, bias, targets_T, temperatures_T = given(torch.float32)
    free = sampled_logprobs(hidden, weight, bias, targets_T, temperatures_T)
    (expected,) = torch.autograd.grad(free[:, 0].sum(), [hidden])
    frozen = sampled_logprobs(hidden, weight.detach(), bias.detach(), targets_T, temperatures_T)
    frozen[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, expected)
    assert weight.grad is None


def test_an_entropy_without_a_bonus_has_no_gradient() -> None:
    hidden, weight, bias, targets_T, temperatures_T = given(torch.float32)
    made_T2 = sampled_logprobs(hidden, weight, bias, targets_T, temperatures_T)
    (gradient,) = torch.autograd.grad(made_T2[:, 1].sum(), [hidden])
    assert not gradient.any()


def storages(tree: Any) -> list[tuple[StorageWeakRef, int]]:
    """A weak reference to the storage of each tensor in `tree`, and its size in bytes."""
    found = [each.untyped_storage() for each in tree_leaves(tree) if torch.is_tensor(each)]
    return [(StorageWeakRef(each), each.nbytes()) for each in found]  # type: ignore[no-untyped-call]


class LargestLive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The peak of bytes, at any one time, in tensors that are made in this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        given = {reference.cdata for reference, _ in storages((args, kwargs))}
        for reference, size in storages(made):
            if reference.cdata not in given:
                self._made[reference.cdata] = (reference, size)
        gone = [key for key, (kept, _) in self._made.items() if kept.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._made[key]
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return made


def all_at_once(hidden: Tensor, weight: Tensor, _: None, targets_T: Tensor, temperatures_T: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.stack(selected_logprobs(logits, targets_T, temperatures_T), 1)


def most_bytes(way: Callable[..., Tensor], tokens: int, vocabulary: int) -> int:
    hidden, weight, _, targets_T, temperatures_T = given(torch.float32, tokens, vocabulary)
    with LargestLive() as live:
        way(hidden, weight, None, targets_T, temperatures_T)[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    return int(live.most)


def test_the_head_takes_a_fraction_of_the_memory_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 152k and 4k tokens, both divided by 32: so the logits are 32 · 32 times smaller."""
    tokens, vocabulary = 4096 // 32, 151_936 // 32
    monkeypatch.setattr(logprob_head, "LOGITS_AT_ONCE", 2**24 // 32**2)
    ours, naive = (most_bytes(way, tokens, vocabulary) for way in (sampled_logprobs, all_at_once))
    assert naive > 2 * 4 * tokens * vocabulary, "the naive way holds some tensors of all logits"
    assert ours < naive / 5
    twice = most_bytes(sampled_logprobs, 2 * tokens, vocabulary)
    assert twice - ours < 4 * 2 * tokens * (WIDTH + 8), "only hidden states and one number per token grow"


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors of one shape that are made in this context; views and results in place are none."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        given = {id(each) for each in tree_leaves((args, kwargs))}
        for each in tree_leaves(made):
            if torch.is_tensor(each) and tuple(each.shape) == self._shape and id(each) not in given:
                self.count += not func.is_view
        return made


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weight_is_one_sum_for_all_chunks(dtype: torch.dtype, device: str) -> None:
    """Meta tensors take the way of CUDA, which multiplies 16-bit values into float32."""
    hidden, weight, _, targets_T, temperatures_T = (each.to(device) for each in given(dtype))
    result_T2 = sampled_logprobs(hidden, weight, None, targets_T, temperatures_T)
    with Made((VOCABULARY, WIDTH)) as made:
        (gradient,) = torch.autograd.grad(result_T2[:, 0].sum(), [weight])
    assert gradient.dtype == dtype
    assert made.count == (1 if dtype is torch.float32 else 2), "the sum, and its copy of 16 bits"


@pytest.mark.parametrize(("gib", "tokens"), [(24, 512), (80, 2048)])
def test_a_chunk_on_cuda_grows_with_the_memory(
    monkeypatch: pytest.MonkeyPatch, gib: int, tokens: int
) -> None:
    """Adding a chunk's product to the sum takes as long as the product itself if a chunk has 1,066 tokens: an
    H100 makes 8e14 operations a second, and moves 3e12 bytes."""
    facts = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    found = logits_at_once(torch.device("cuda", 0))
    assert tokens <= found / 151_936 < 2 * tokens
    assert found * BYTES_OF_A_LOGIT < facts.total_memory / 30


def test_no_pass_takes_more_than_its_bytes_of_a_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocabulary = 64, 4096
    monkeypatch.setattr(logprob_head, "LOGITS_AT_ONCE", tokens * vocabulary)
    for dtype, others in ((torch.float32, 2), (torch.bfloat16, 4)):
        hidden, weight, _, targets_T, temperatures_T = given(dtype, tokens, vocabulary)
        with LargestLive() as live:
            sampled_logprobs(hidden, weight, None, targets_T, temperatures_T)[:, 0].sum().backward()  # type: ignore[no-untyped-call]
        of_weight = others * 4 * vocabulary * WIDTH
        assert live.most < BYTES_OF_A_LOGIT * tokens * vocabulary + of_weight


def changed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model halve its logits, which its configuration does not say."""
    whole = model.forward

    def halved(**inputs: Any) -> Any:
        made = whole(**inputs)
        made.logits = made.logits / 2
        return made

    monkeypatch.setattr(model, "forward", halved)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_scored_from_all_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    (batch,) = micro_batches([row_of(9), row_of(12)], 100)
    doubled = dataclasses.replace(batch, temperatures_T=batch.temperatures_T * 2)
    expected = scores(model, doubled, packing_of(model), DEVICE)[:2]
    changed(model, monkeypatch)
    for _ in range(2):
        got = scores(model, batch, packing_of(model), DEVICE)[:2]
        torch.testing.assert_close(got, expected)
    assert [
        record.message for record in caplog.records if record.name == "trainer_service.model.logprob_head"
    ] == ["the model changes its logits in an unknown way: all logits are computed at once"]


@pytest.mark.parametrize("family", [FAMILIES[1], FAMILIES[4]], ids=["tied", "capped"])
def test_the_head_keeps_its_place_in_the_model(family: Family, tmp_path: Path) -> None:
    plain = made(family, tmp_path).to(DEVICE)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    assert isinstance(model.get_output_embeddings(), LogprobHead)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.lm_head.weight is model.get_input_embeddings().weight
    ids = torch.arange(9, device=DEVICE)[None]
    (batch,) = micro_batches([row_of(9)], 100)
    before = model(ids, use_cache=False).logits
    torch.testing.assert_close(before, plain(ids, use_cache=False).logits)
    scores(model, batch, packing_of(model), DEVICE)
    assert torch.equal(model(ids, use_cache=False).logits, before), "a pass leaves the model as it was"
