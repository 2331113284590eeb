"""The attention of packed rows: by plain kernels, in real architectures, and with flash-attn."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.tolerances import BFLOAT16, ulps
from tests.support.trainer_service.device import DEVICE
from tests.support.trainer_service.fake_flash import CALLS, install_fake_flash
from tests.support.trainer_service.model_families import FAMILIES, SMALL, Family, made
from tests.support.trainer_service.random_rows import row_of
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.packed_attention import Packing, attend, packing_of
from trainer_service.rows.rows import MicroBatch, Row, micro_batches

# One row has the plain result, by kernels that keep no matrix of all pairs of tokens


pytestmark = pytest.mark.numeric

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def shapes(length: int, rows: int = 1) -> list[tuple[int, ...]]:
    """Of query, key and value: [B, heads, L, D]."""
    return [(rows, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def drawn(length: int, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(length)
    q, k, v = (torch.randn(shape).to(DEVICE).requires_grad_() for shape in shapes(length, rows))
    return q, k, v


def plainly(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """The softmax of all scores, in float64."""
    k, v = (each.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    distance_LL = torch.arange(q.shape[2], device=DEVICE)
    distance_LL = distance_LL[:, None] - distance_LL
    seen_LL = (distance_LL >= 0) & (distance_LL < (window or q.shape[2]))
    scores = q.double() @ k.transpose(2, 3) * (WIDTH**-0.5 if scaling is None else scaling)
    return (scores.masked_fill(~seen_LL, -torch.inf).softmax(3) @ v).float()


@pytest.mark.parametrize("window", [None, 1, 3, 8, 16, 17, 40])
@pytest.mark.parametrize("length", [1, 7, 16, 17, 33])
def test_results_and_gradients_are_those_of_all_scores(length: int, window: int | None) -> None:
    qkv = drawn(length, rows=2)
    ours, plain = (way(*qkv, 0.3, window) for way in (attend, plainly))
    # A score sums WIDTH products, and a result sums up to `length` values.
    allowed = ulps(WIDTH + length, of=max(1.0, float(plain.detach().abs().max())))
    torch.testing.assert_close(ours, plain, atol=allowed, rtol=0)
    slope = torch.randn_like(plain)
    pairs = zip(*(torch.autograd.grad((each * slope).sum(), qkv) for each in (ours, plain)), strict=True)
    for mine, other in pairs:
        close = ulps(WIDTH + 4 * length, of=max(1.0, float(other.abs().max())))
        torch.testing.assert_close(mine, other, atol=close, rtol=0)


class LargestMade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of elements of the largest tensor that is made in this context."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        self.most = max([self.most, *(each.numel() for each in tree_leaves(made) if torch.is_tensor(each))])
        return made


def largest_made(length: int, window: int) -> int:
    qkv = drawn(length)
    with LargestMade() as made:  # type: ignore[no-untyped-call]
        attend(*qkv, None, window).sum().backward()  # type: ignore[no-untyped-call]
    return int(made.most)


def test_a_window_takes_memory_that_grows_with_the_row_and_not_with_its_square() -> None:
    length, window = 512, 16
    assert largest_made(length, window) < length * length / 4, "no mask of all pairs of tokens"
    assert largest_made(2 * length, window) <= 2 * largest_made(length, window) + HEADS * 2 * window * window


class Calls(TorchFunctionMode):
    """Records the calls of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Sequence[Tensor], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.seen.append((args, kwargs or {}))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_the_cpu_no_call_is_left_to_the_math_kernel(dtype: torch.dtype, window: int | None) -> None:
    """Torch's flash kernel takes 16-bit values without a mask, also with fewer heads of keys. Its memory
    efficient kernel takes the others, if there are as many heads of keys as of queries. Meta tensors take the
    way of CUDA."""
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes(100))
    with Calls() as calls:
        assert attend(q, k, v, None, window).shape == (1, HEADS, 100, WIDTH)
    for (q, k, v), more in calls.seen:
        mask = more.get("attn_mask")
        flash = dtype is torch.bfloat16 and mask is None
        assert flash or q.shape[1] == k.shape[1] == v.shape[1]
        assert bool(more.get("enable_gqa")) == (q.shape[1] != k.shape[1])
        assert mask is None or mask.shape[-1] <= 2 * 16
    assert len(calls.seen) == (1 if window is None else 3)


# Packed rows in real architectures: each row gets the same result as alone


ROWS = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17])]


def scored(model: Any, batch: MicroBatch) -> torch.Tensor:
    lp_T, entropy_T, _ = scores(model, batch, packing_of(model), DEVICE)
    return torch.stack([lp_T, entropy_T], 1).detach().cpu()


def largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def alone(plain: Any, row: Row) -> torch.Tensor:
    """log p and entropy of a row's trained tokens, by transformers and log_softmax."""
    at = np.flatnonzero(row.mask_L)
    logits = plain(torch.from_numpy(row.ids_L)[None], use_cache=False).logits[0, at - 1].detach()
    lp_TV = (logits / torch.from_numpy(row.temperatures_L[at])[:, None]).log_softmax(-1)
    lp_T = lp_TV[torch.arange(len(at)), torch.from_numpy(row.ids_L[at])]
    return torch.stack([lp_T, -(lp_TV.exp() * lp_TV).sum(-1)], 1)


def batch_of(rows: list[Row]) -> MicroBatch:
    (batch,) = micro_batches(rows, 1000)
    return batch


class Models(NamedTuple):
    """One model of a family: as transformers computes it, and as the trainer does."""

    family: Family
    plain: Any
    own: Any


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: f"{family.name}-{len(family.options)}")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("model")
    plain = made(request.param, directory)
    return Models(request.param, plain, load_model(directory, torch.float32).eval().to(DEVICE))


def test_packed_rows_are_scored_as_transformers_scores_each_alone(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    assert packing_of(models.own) is models.family.packing
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17, 2, 9])]
    batch = batch_of(rows)
    expected = torch.cat([alone(models.plain, rows[int(one.rows_T[0])]) for one in batch.single_rows()])
    # Sums of up to 48 products, some of them in another order.
    torch.testing.assert_close(
        scored(models.own, batch),
        expected,
        atol=ulps(SMALL["intermediate_size"], of=largest(expected)),
        rtol=0,
    )
    assert "computed at once" not in caplog.text, "every family gets the trainer's own head"


def test_no_row_changes_a_bit_of_another(models: Models) -> None:
    batch, before = batch_of(ROWS), scored(models.own, batch_of(ROWS))
    for changed in range(4):
        others = list(ROWS)
        others[changed] = replace(ROWS[changed], ids_L=2 + (ROWS[changed].ids_L + 7) % 60)
        after = scored(models.own, batch_of(others))
        elsewhere = torch.from_numpy(batch.rows_T != changed)
        assert torch.equal(after[elsewhere], before[elsewhere])
        assert not torch.equal(after[~elsewhere], before[~elsewhere])


def test_a_row_has_the_gradient_that_it_has_alone(models: Models) -> None:
    model, batch, gradients = models.own, batch_of(ROWS), []
    for passes in ((batch,), batch.single_rows()):
        model.zero_grad()
        for one in passes:
            lp_T, *_ = scores(model, one, packing_of(model), DEVICE)
            (lp_T.sum() / len(batch.targets_T)).backward()  # type: ignore[no-untyped-call]
        gradients.append(
            {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        )
    together, apart = gradients
    assert together.keys() == apart.keys()
    for name, gradient in together.items():  # each is a sum over all positions of all rows
        allowed = ulps(len(batch.ids_N), of=largest(apart[name]))
        torch.testing.assert_close(gradient, apart[name], atol=allowed, rtol=0, msg=name)


def test_no_plan_is_made_for_each_length_of_row(tmp_path: Path) -> None:
    """cuDNN's attention plans each new length, for longer than it takes to compute."""
    made(FAMILIES[0], tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(tmp_path, torch.bfloat16)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_a_pack_of_half_precision_is_scored_as_each_row_alone(tmp_path: Path) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.bfloat16).eval().to(DEVICE)
    batch = batch_of(ROWS)
    apart = torch.cat([scored(model, one) for one in batch.single_rows()])
    # A kernel may round once more where it is given more positions.
    torch.testing.assert_close(
        scored(model, batch), apart, atol=ulps(1, of=largest(apart), unit=BFLOAT16), rtol=0
    )


def test_a_model_that_loses_the_bounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    whole = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *a, segments, **rest: whole(*a, **rest))
    batch = batch_of([row_of(9)])
    with pytest.raises(RuntimeError, match="does not pass the bounds of packed rows to its attention"):
        scored(model, batch)


def test_an_attention_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    model.model.layers[0].self_attn.is_causal = False
    batch = batch_of([row_of(9)])
    with pytest.raises(ValueError, match="Qwen3Attention asks for attention that packed rows do not support"):
        scored(model, batch)


# With flash-attn, a pack is one call with the bounds of its rows, with the same results


CPU = torch.device("cpu")
LENGTHS = [23, 17, 9, 9, 2]


def pack() -> MicroBatch:
    (batch,) = micro_batches([row_of(length, seed) for seed, length in enumerate(LENGTHS)], 1000)
    return batch


@pytest.mark.parametrize("family", FAMILIES[:6], ids=lambda family: f"{family.name}-{len(family.options)}")
def test_flash_attention_gets_the_bounds_and_gives_what_packed_attention_gives(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(family, tmp_path)
    packed = load_model(tmp_path, torch.bfloat16).eval()
    install_fake_flash(monkeypatch)
    model = load_model(tmp_path, torch.bfloat16, flash=True).eval()
    assert packing_of(model) is Packing.FLASH
    batch = pack()
    found, *_ = scores(model, batch, packing_of(model), CPU)
    expected, *_ = scores(packed, batch, packing_of(packed), CPU)
    # Each of two layers rounds some ten results to bfloat16, perhaps not the same way.
    allowed = ulps(20, of=float(expected.detach().abs().max()), unit=BFLOAT16)
    torch.testing.assert_close(found, expected, atol=allowed, rtol=0)
    windows = [family.options.get("sliding_window"), None]
    if "layer_types" not in family.options:
        windows = windows[:1] * 2
    assert [call.window for call in CALLS] == [(-1, -1) if w is None else (w - 1, w - 1) for w in windows]
    for call in CALLS:
        assert (call.bounds, call.longest) == ([0, 23, 40, 49, 58, 60], 23)
        assert (call.heads, call.key_heads, call.dtype) == (4, 2, torch.bfloat16)


def test_the_gradient_through_flash_attention_is_that_of_packed_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(FAMILIES[0], tmp_path)
    gradients = []
    for on_cuda in (False, True):
        if on_cuda:
            install_fake_flash(monkeypatch)
        model = load_model(tmp_path, torch.bfloat16, flash=on_cuda).eval()
        lp_T, *_ = scores(model, pack(), packing_of(model), CPU)
        lp_T.mean().backward()  # type: ignore[no-untyped-call]
        gradients.append(torch.cat([each.grad.float().flatten() for each in model.parameters()]))
    assert CALLS
    packed, flash = gradients
    assert (flash - packed).norm() < ulps(20, of=float(packed.norm()), unit=BFLOAT16)


def test_attention_sinks_are_not_left_to_a_kernel_that_ignores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (family,) = [each for each in FAMILIES if each.name == "GptOss"]
    made(family, tmp_path)
    install_fake_flash(monkeypatch)
    model = load_model(tmp_path, torch.bfloat16, flash=True).eval()
    assert packing_of(model) is Packing.SEGMENTS
    scores(model, pack(), packing_of(model), CPU)
    assert not CALLS


def test_without_the_package_the_log_names_the_fallback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainer_service")
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.bfloat16, flash=True)
    assert packing_of(model) is Packing.SEGMENTS
    assert "flash-attn is not installed; using torch's attention, row by row" in caplog.text
