"""Checks attention, output head and a whole forward pass on the device against float64 or float32 on CPU."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.checks import Check, at_most, peak_bytes
from bench.policies import rows_of
from bench.rollouts import SyntheticRollout
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.logprob_head import (
    BYTES_OF_A_LOGIT,
    LogitTransform,
    logits_at_once,
    sampled_logprobs,
)
from trainer_service.model.packed_attention import attend, packing_of
from trainer_service.rows.rows import micro_batches

CPU = torch.device("cpu")
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""The largest error of attention's results, which are below 5; 0.05 is some roundings of bfloat16."""
LOGPROBS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""The largest mean |Δlogprob| in nats between two computations with the same weights."""
LENGTHS = {"cuda": 8192, "cpu": 256}


def kernels(device: torch.device, dtypes: Sequence[torch.dtype], model: Path) -> Iterator[Check]:
    torch.manual_seed(0)
    for dtype in dtypes:
        for check in _of_type(device, dtype, model):
            yield replace(check, what=f"{str(dtype).removeprefix('torch.')}: {check.what}")


def _of_type(device: torch.device, dtype: torch.dtype, model: Path) -> Iterator[Check]:
    for window in (None, 100):
        yield _attention_error(device, dtype, window)
    for window in (None, 128):
        yield _attention_memory(device, dtype, window)
    yield from _head(device, dtype)
    yield _whole_model(device, dtype, model)


def _drawn(length: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(1, heads, length, 64) for heads in (8, 2, 2)]
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def _attention_error(device: torch.device, dtype: torch.dtype, window: int | None) -> Check:
    length = 257
    q, k, v = _drawn(length, device, dtype)
    mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))
    exact_q, exact_k, exact_v = (each.detach().to(CPU, torch.float64) for each in (q, k, v))
    expected = scaled_dot_product_attention(exact_q, exact_k, exact_v, attn_mask=mask, enable_gqa=True)
    found = attend(q, k, v, None, window).detach().to(CPU, torch.float64)
    name = f"attention{f', window {window}' if window else ''}: largest error"
    return at_most(name, float((found - expected).abs().max()), ERRORS[dtype])


def _attention_memory(device: torch.device, dtype: torch.dtype, window: int | None) -> Check:
    """A kernel that keeps all scores takes 4 bytes for each of 8 · 8192² pairs: 2 GB."""
    length = LENGTHS[device.type]
    q, k, v = _drawn(length, device, dtype)
    used = peak_bytes(device, lambda: attend(q, k, v, None, window).sum().backward())  # type: ignore[no-untyped-call]
    name = f"attention of {length} tokens{f', window {window}' if window else ''}: peak"
    return at_most(name, used / 1e9, 0.5, " GB")


def _head(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    tokens, vocabulary, width = (4096, 151_936, 1024) if device.type == "cuda" else (64, 1000, 32)
    hidden = torch.randn(tokens, width).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) / width**0.5).to(device, dtype).requires_grad_()
    targets, ones = torch.randint(vocabulary, (tokens,)).to(device), torch.ones(tokens, device=device)

    def learn() -> None:
        result = sampled_logprobs(hidden, weight, None, targets, ones, LogitTransform())
        result[:, 0].sum().backward()  # type: ignore[no-untyped-call]
        some = slice(0, 16)
        logits = hidden[some].detach().to(CPU).double() @ weight.detach().to(CPU).double().T
        exact = logits.log_softmax(1).gather(1, targets[some].to(CPU)[:, None])[:, 0]
        errors.append(float((result[some, 0].detach().to(CPU) - exact).abs().max()))

    errors: list[float] = []
    used = peak_bytes(device, learn)
    yield at_most("log-probabilities of the head: largest error", errors[0], 1e-4)
    of_weight = vocabulary * width * (4 + 2 * weight.element_size())
    limit = logits_at_once(device) * 1.5 * BYTES_OF_A_LOGIT + of_weight + 1e8
    yield at_most(f"the head of {tokens} tokens and {vocabulary} ids: peak", used / 1e9, limit / 1e9, " GB")


@torch.no_grad()
def _whole_model(device: torch.device, dtype: torch.dtype, path: Path) -> Check:
    """Rows in packs on the device, with flash attention if it is installed, and in float32 on CPU."""
    rows = rows_of([SyntheticRollout([3, 5], list(range(7, 7 + n)), 0.0, []) for n in (90, 40, 40, 3)])
    (batch,) = micro_batches(rows, 1000)
    found = []
    for where, kind in ((CPU, torch.float32), (device, dtype)):
        model = load_model(path, kind, flash=where.type == "cuda").eval().to(where)
        lp_T, *_ = scores(model, batch, packing_of(model), where)
        found.append(lp_T.to(CPU))
    mean = float((found[0] - found[1]).abs().mean())
    return at_most("the model's |Δlogprob| to float32 on CPU, mean", mean, LOGPROBS[dtype], " nats")
