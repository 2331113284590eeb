"""The output head of a policy. It computes log p and entropy of sampled tokens, a few logits at a time, at
the temperature of each token.

It replaces the model's linear head, with the same weight and under the same name. So DeepSpeed gathers its
weight like that of any module, and checkpoints and tied embeddings do not change.

Names such as `logits.logp_entropy_T1.0` are cases of `algorithms_golden.json` in the tests.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer_service.algorithms.tokens import widened

logger = logging.getLogger(__name__)

LOGITS_AT_ONCE = 2**24
"""The number of logits in a chunk on CPU: 64 MiB of float32, and as much again for their probabilities."""
BYTES_OF_A_LOGIT = 8
"""The memory that a chunk takes for each of its logits, except if the model caps its logits: then 16."""
CHUNK_SHARE = 1 / 32
"""The share of a GPU's memory that a chunk takes. The product of each chunk is added to the weight's gradient
at the speed of the memory: larger chunks need fewer sums. 80 GB and 152k ids give chunks of 2,200 tokens."""
LEAST_LOGP = -1000.0
"""Of a log p below this, p is 0 in every format, and so is its product with p. That of -inf would be NaN."""
WEIGHTS_AT_ONCE = 2**22
"""The number of half-precision weights that are multiplied at a time on CPU, which cannot multiply them into
a float32 result."""


@dataclass(frozen=True)
class LogitTransform:
    """The change that a model makes to its logits after the head. `LogprobHead` makes it instead."""

    scale: float = 1.0
    softcap: float | None = None
    columns: int | None = None
    """The number of logits that the model keeps; the other rows of its head only pad. None: all."""

    def __call__(self, logits_CV: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits_CV = logits_CV * self.scale
        if self.softcap is not None:
            logits_CV = (logits_CV / self.softcap).tanh_() * self.softcap
        return logits_CV

    def gradient(self, transformed_CV: Tensor, gradient_CV: Tensor) -> Tensor:
        """The gradient of the logits, from the transformed logits and their gradient."""
        if self.softcap is not None:
            gradient_CV = gradient_CV * (1 - (transformed_CV / self.softcap) ** 2)
        return gradient_CV * self.scale if self.scale != 1.0 else gradient_CV


@dataclass(frozen=True)
class LowRank:
    """An adapter's part of the logits: inputs · weightᵀ, added before the transform."""

    inputs_TR: Tensor
    weight_VR: Tensor

    def logits(self) -> Tensor:
        """All of them, which need much memory."""
        return torch.nn.functional.linear(self.inputs_TR, self.weight_VR)

    def row(self, at: int) -> "LowRank":
        """One row of inputs that have another dimension first."""
        return LowRank(self.inputs_TR[at], self.weight_VR)


def sampled_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets: Tensor,
    temperatures_T: Tensor,
    transform: LogitTransform | None = None,
    entropy_gradient: bool = False,
    low_rank: LowRank | None = None,
) -> Tensor:
    """[T, K + 1]: log p of each target and the entropy, in nats, at the temperature of the sampled token.
    `targets` are [T, K], or [T] for K = 1 (`logits.logp_entropy_T*` of `algorithms_golden.json` in the
    tests). The result is float64 if the hidden states are, otherwise float32. The entropy has a gradient only
    if `entropy_gradient`: dH/dz = -p (log p + H).
    """
    targets_TK = targets if targets.dim() == 2 else targets[:, None]
    factors = [hidden_TH, weight_VH]
    if low_rank is not None:
        factors += [low_rank.inputs_TR, low_rank.weight_VR]
    arguments = (
        targets_TK,
        temperatures_T,
        transform or LogitTransform(),
        entropy_gradient,
        bias_V,
        *factors,
    )
    result: Tensor = _SampledLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _SampledLogprobs(torch.autograd.Function):
    """`factors` are inputs and weights in turn. The logits are the sum of their products."""

    @staticmethod
    def forward(
        ctx: Any,
        targets_TK: Tensor,
        temperatures_T: Tensor,
        transform: LogitTransform,
        entropy_gradient: bool,
        bias_V: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        kept, kept_bias_V = _kept(factors, transform.columns), _cut(bias_V, transform.columns)
        hidden_TH, weight_VH = kept[:2]
        result_TK = hidden_TH.new_empty(len(hidden_TH), targets_TK.shape[1] + 1, dtype=_wide(hidden_TH))
        normaliser_T = result_TK.new_empty(len(hidden_TH))
        for some in _chunks(hidden_TH, weight_VH):
            z_CV = transform(_logits(kept, kept_bias_V, some)).div_(temperatures_T[some, None])
            normaliser_C = torch.logsumexp(z_CV, dim=1)
            logp_CV = z_CV.sub_(normaliser_C[:, None])
            result_TK[some, :-1] = logp_CV.gather(1, targets_TK[some])
            result_TK[some, -1] = -logp_CV.exp().mul_(logp_CV.clamp_(min=LEAST_LOGP)).sum(1)
            normaliser_T[some] = normaliser_C
        # The weights themselves are saved, as in DeepSpeed's linear layer: ZeRO gathers them again for the
        # backward.
        entropy_T = result_TK[:, -1].clone()
        ctx.save_for_backward(targets_TK, temperatures_T, normaliser_T, entropy_T, bias_V, *factors)
        ctx.transform, ctx.entropy_gradient = transform, entropy_gradient
        return result_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TK: Tensor) -> tuple[Tensor | None, ...]:
        targets_TK, temperatures_T, normaliser_T, entropy_T, bias_V, *factors = ctx.saved_tensors
        _, _, _, _, needs_bias, *needed = ctx.needs_input_grad
        columns = ctx.transform.columns
        kept, kept_bias_V = _kept(factors, columns), _cut(bias_V, columns)
        hidden_TH, weight_VH = kept[:2]
        wide = _wide(hidden_TH)
        of_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        of_inputs = [
            torch.empty_like(inputs) if needs else None
            for inputs, needs in zip(factors[::2], needed[::2], strict=True)
        ]
        of_weights = [
            torch.zeros_like(weight, dtype=wide) if needs else None
            for weight, needs in zip(factors[1::2], needed[1::2], strict=True)
        ]
        for some in _chunks(hidden_TH, weight_VH):
            transformed_CV = ctx.transform(_logits(kept, kept_bias_V, some))
            kept_CV = transformed_CV.clone() if ctx.transform.softcap is not None else transformed_CV
            logp_CV = transformed_CV.div_(temperatures_T[some, None]).sub_(normaliser_T[some, None])
            entropy_C = entropy_T[some] if ctx.entropy_gradient else None
            gradient_CV = _of_logits(logp_CV, targets_TK[some], gradient_TK[some], entropy_C)
            gradient_CV.div_(temperatures_T[some, None])
            gradient_CV = ctx.transform.gradient(kept_CV, gradient_CV)
            if of_bias is not None:
                of_bias[:columns] += gradient_CV.sum(0)
            gradient_CV = gradient_CV.to(weight_VH.dtype)
            for inputs_TH, weight, of_input, of_weight in zip(
                kept[::2], kept[1::2], of_inputs, of_weights, strict=True
            ):
                if of_input is not None:
                    of_input[some] = gradient_CV @ weight
                if of_weight is not None:
                    _add_product(of_weight[:columns], gradient_CV, inputs_TH[some])
        sums = [each for pair in zip(of_inputs, of_weights, strict=True) for each in pair]
        return (
            *(None,) * 4,
            None if of_bias is None else of_bias.to(bias_V.dtype),
            *(None if made is None else made.to(of.dtype) for made, of in zip(sums, factors, strict=True)),
        )


def _kept(factors: Sequence[Tensor], columns: int | None) -> list[Tensor]:
    """The factors, with the rows of the weights that make the first `columns` logits."""
    return [each[:columns] if at % 2 else each for at, each in enumerate(factors)]


def _cut(bias_V: Tensor | None, columns: int | None) -> Tensor | None:
    return None if bias_V is None else bias_V[:columns]


def _of_logits(logp_CV: Tensor, targets_CK: Tensor, gradient_CK: Tensor, entropy_C: Tensor | None) -> Tensor:
    """dL/dz = sum of g (1[target] - p) - e p (log p + H), with g = dL/d log p and e = dL/dH."""
    g_CK = gradient_CK[:, :-1]
    g_C = g_CK.sum(1)
    if entropy_C is None:
        gradient_CV = logp_CV.exp_().mul_(-g_C[:, None])
    else:
        e_C = gradient_CK[:, -1]
        p_CV = logp_CV.exp()
        slope_CV = logp_CV.clamp_(min=LEAST_LOGP).add_(entropy_C[:, None]).mul_(e_C[:, None])
        gradient_CV = slope_CV.add_(g_C[:, None]).mul_(p_CV).neg_()
    return gradient_CV.scatter_add_(1, targets_CK, g_CK)


def _add_product(sum_VH: Tensor, gradient_CV: Tensor, hidden_CH: Tensor) -> None:
    """Add gradientᵀ · hidden in place. No other tensor of the sum's size is made."""
    if sum_VH.dtype == gradient_CV.dtype:
        sum_VH.addmm_(gradient_CV.T, hidden_CH)
    elif sum_VH.device.type != "cpu":
        torch.addmm(sum_VH, gradient_CV.T, hidden_CH, out_dtype=sum_VH.dtype, out=sum_VH)
    else:
        for some in _weight_rows(sum_VH):
            sum_VH[some] += gradient_CV[:, some].T @ hidden_CH


def _logits(factors: Sequence[Tensor], bias_V: Tensor | None, some: slice) -> Tensor:
    """The logits of some tokens in float32 or float64, never rounded to half precision."""
    logits_CV = _product(factors[0][some], factors[1])
    for inputs_TR, weight_VR in zip(factors[2::2], factors[3::2], strict=True):
        logits_CV += _product(inputs_TR[some], weight_VR)
    return logits_CV if bias_V is None else logits_CV.add_(bias_V)


def _product(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    """hidden · weightᵀ."""
    wide = _wide(hidden_CH)
    if weight_VH.dtype == wide:
        logits_CV = hidden_CH.to(wide) @ weight_VH.T
    elif hidden_CH.device.type != "cpu":
        logits_CV = torch.mm(hidden_CH, weight_VH.T, out_dtype=wide)
    else:
        logits_CV = hidden_CH.new_empty(len(hidden_CH), len(weight_VH), dtype=wide)
        for some in _weight_rows(weight_VH):
            logits_CV[:, some] = hidden_CH.to(wide) @ weight_VH[some].to(wide).T
    return logits_CV


def logits_at_once(device: torch.device) -> int:
    """The number of logits in a chunk: on CPU, so many that they stay near the processor; on CUDA, a share of
    its memory."""
    if device.type != "cuda":
        return LOGITS_AT_ONCE
    return int(torch.cuda.get_device_properties(device).total_memory * CHUNK_SHARE / BYTES_OF_A_LOGIT)


def _chunks(hidden_TH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    return _slices(len(hidden_TH), logits_at_once(hidden_TH.device) // len(weight_VH))


def _weight_rows(weight_VH: Tensor) -> Iterator[slice]:
    return _slices(len(weight_VH), WEIGHTS_AT_ONCE // weight_VH.shape[1])


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + max(1, size)) for start in range(0, count, max(1, size)))


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


@dataclass
class LogprobRequest:
    """The tokens whose log p one forward pass computes, and the head's result."""

    targets_TK: Tensor
    temperatures_T: Tensor
    entropy_gradient: bool
    undo: ExitStack = field(default_factory=ExitStack)
    head: "LogprobHead | None" = None
    """The head that computed the result; None if it returned logits, or if the model has another one."""
    result_1TK: Tensor | None = None


_current_request: ContextVar[LogprobRequest | None] = ContextVar("_current_request", default=None)


@contextmanager
def requesting_logprobs(
    targets_TK: Tensor, temperatures_T: Tensor, entropy_gradient: bool = False
) -> Iterator[LogprobRequest]:
    """Inside the context, a `LogprobHead` returns log p and entropy of these targets instead of logits."""
    request = LogprobRequest(targets_TK, temperatures_T, entropy_gradient)
    token = _current_request.set(request)
    try:
        with request.undo:
            yield request
    finally:
        _current_request.reset(token)


class LogprobHead(torch.nn.Module):
    """A linear head; inside `requesting_logprobs` it returns log p and entropy of sampled tokens instead of
    logits."""

    def __init__(self, head: torch.nn.Linear, model: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.in_features, self.out_features = head.in_features, head.out_features
        self._transform, self._neutral_attributes = logit_transform_of(model)
        self.returns_logits = False
        """Whether the model changes its logits in an unknown way, so that it needs all of them."""

    def forward(self, hidden_1TH: Tensor, low_rank: LowRank | None = None) -> Tensor:
        """`low_rank` is an adapter's part of the logits; the first dimension of its inputs is 1."""
        request = _current_request.get()
        if request is None or self.returns_logits:
            logits_1TV = torch.nn.functional.linear(hidden_1TH, self.weight, self.bias)
            return logits_1TV if low_rank is None else logits_1TV + low_rank.logits()
        if hidden_1TH.shape[:2] != (1, len(request.targets_TK)):
            raise ValueError(
                f"{len(request.targets_TK)} sampled tokens, and hidden states of {hidden_1TH.shape[1]}: "
                "the model does not support `logits_to_keep`"
            )
        for owner, name, neutral in self._neutral_attributes:
            request.undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, neutral)
        result_TK = sampled_logprobs(
            hidden_1TH[0],
            self.weight,
            self.bias,
            request.targets_TK,
            request.temperatures_T,
            self._transform,
            request.entropy_gradient,
            low_rank and low_rank.row(0),
        )
        request.head, request.result_1TK = self, result_TK.detach()[None]
        return result_TK[None]

    def was_unchanged(self, output_1TK: Tensor, result_1TK: Tensor | None) -> bool:
        """Whether the model returned the result unchanged. If not, the head returns logits from now on."""
        if result_1TK is None or not torch.equal(output_1TK.nan_to_num(), result_1TK.nan_to_num()):
            logger.warning("the model changes its logits in an unknown way: all logits are computed at once")
            self.returns_logits = True
        return not self.returns_logits

    def cut(self, columns: int | None) -> None:
        """Compute the first `columns` logits only, as the model cuts off the others; None: all."""
        self._transform = replace(self._transform, columns=columns)


def set_head(model: Any) -> None:
    """Replace the model's output head by a `LogprobHead`, if it is a plain linear layer."""
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        model.set_output_embeddings(LogprobHead(head, model))
    else:
        logger.info("%s has no plain linear head: all logits are computed at once", type(model).__name__)


def logit_transform_of(model: Any) -> tuple[LogitTransform, list[tuple[Any, str, float | None]]]:
    """The change that the model makes to its logits, and the attributes (owner, name, neutral value) that
    switch it off.

    Cohere multiplies by `logit_scale`; Granite divides by `logits_scaling`; Gemma 2 caps.
    """
    config = model.config.get_text_config()
    scale = 1.0
    neutral_values: list[tuple[str, float | None]] = []
    if isinstance(factor := getattr(config, "logit_scale", None), int | float):  # MPT names a formula
        scale = float(factor)
        neutral_values.append(("logit_scale", 1.0))
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale = 1.0 / float(divisor)
        neutral_values.append(("logits_scaling", 1.0))
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        neutral_values.append(("final_logit_softcapping", None))
    owners = [(model if hasattr(model, name) else config, name, neutral) for name, neutral in neutral_values]
    return LogitTransform(scale, softcap), owners


def selected_logprobs(logits_TV: Tensor, targets: Tensor, temperatures_T: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each target, [T] or [T, K] as `targets` are, and the entropy [T] without gradient, in nats, at
    the temperature of the sampled token (`logits.logp_entropy_T1.0`, `logits.logp_entropy_T0.7`).

    A token with logit -inf has probability 0; the probabilities of the others sum to 1
    (`logits.topk3_renormalised_logp`).
    """
    scaled_TV = _scaled(logits_TV, temperatures_T)
    logprobs = _selected(scaled_TV, targets)
    with torch.no_grad():
        entropy_T = _entropy(scaled_TV)
    return logprobs, entropy_T


def entropies(logits_TV: Tensor, temperatures_T: Tensor) -> Tensor:
    """[T] in nats: logsumexp(z) - sum of p · z, with gradient, for an entropy bonus. A token of probability 0
    adds 0, and gets the gradient 0."""
    return _entropy(_scaled(logits_TV, temperatures_T))


def _scaled(logits_TV: Tensor, temperatures_T: Tensor) -> Tensor:
    return widened(logits_TV) / temperatures_T[:, None]


def _selected(scaled_TV: Tensor, targets: Tensor) -> Tensor:
    chosen_TK = scaled_TV.gather(-1, targets if targets.dim() == 2 else targets[:, None])
    return (chosen_TK - torch.logsumexp(scaled_TV, dim=-1, keepdim=True)).view_as(targets)


def _entropy(scaled_TV: Tensor) -> Tensor:
    normaliser_T = torch.logsumexp(scaled_TV, dim=-1)
    p_TV = (scaled_TV - normaliser_T[:, None]).exp()
    return normaliser_T - (p_TV * scaled_TV.masked_fill(p_TV == 0, 0)).sum(-1)  # 0 · -inf would be NaN
