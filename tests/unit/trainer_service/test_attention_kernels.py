"""The attention of one row has the plain result, by kernels that keep no matrix of all pairs of tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.tolerances import ulps
from tests.support.trainer_service.device import DEVICE
from trainer_service.model.attention.attention_kernels import attend

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
