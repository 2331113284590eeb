"""A probe of the base model: short rows, the model's own values for each row alone, and those of other ways.

a row alone ─ the model's own attention, all of its logits ─▶ log p, entropy: the truth
the same, with one rounding more after each layer ─▶ the model's noise ─▶ the allowed difference
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_service.model.forward import scores
from trainer_service.model.huggingface import first_words
from trainer_service.model.logprob_head import selected_logprobs
from trainer_service.model.packed_attention import Packing
from trainer_service.rows.packing import FEWEST_SHARED
from trainer_service.rows.rows import Ints, MicroBatch, Row, micro_batches

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


LAYER_ULPS = 2
"""By how many units in the last place two ways to compute a layer may differ. A layer rounds some 16 times:
normalisations, queries, keys, values, positions, scores, softmax, attended values, projection, gate, up, and
so on. Each is half a unit off at most, and errors add up like a random walk."""
LOGPROB_ULPS = 16
"""The same of a log-probability: its logarithm, and the sum of all exponentials, which are added in pairs."""
SOME = 4
"""A difference counts if it is that of most of so many neighbouring tokens: for a rounding, a mixture may
send one of them to another expert."""


def own_logits(model: Any, row: Row, device: torch.device) -> Tensor:
    """The logits [L, V] of a row alone, in the dtype that the model gives them."""
    ids_1L = torch.from_numpy(row.ids_L).to(device)[None]
    logits_LV: Tensor = model(input_ids=ids_1L, use_cache=False).logits[0]
    return logits_LV


def own_scores(logits_LV: Tensor, row: Row) -> Tensor:
    """log p and entropy [T, 2] of the trained tokens, from the logits of the row."""
    targets_T = torch.from_numpy(row.ids_L[1:]).to(logits_LV.device)
    temperatures_T = torch.from_numpy(row.temperatures_L[1:]).to(logits_LV.device)
    return torch.stack(selected_logprobs(logits_LV[:-1], targets_T, temperatures_T), 1)


@contextmanager
def rounded_once_more(model: Any, layers: Sequence[Any]) -> Iterator[None]:
    """Inside, the results of the layers and of the input embeddings are off by one unit in the last place."""
    generator = torch.Generator().manual_seed(0)

    def off(_module: Any, _inputs: Any, output: Any) -> Any:
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if not torch.is_tensor(hidden) or not hidden.is_floating_point():
            return output
        signs = torch.randint(0, 2, hidden.shape, generator=generator).to(hidden) * 2 - 1
        hidden = hidden * (1 + torch.finfo(hidden.dtype).eps * signs)
        return (hidden, *others) if isinstance(output, tuple) else hidden

    with ExitStack() as undo:
        for each in [model.get_input_embeddings(), *layers]:
            undo.callback(each.register_forward_hook(off).remove)
        yield


def difference(found_T2: Tensor, truth_T2: Tensor) -> float:
    """How much the values of most of some neighbouring tokens differ, where they differ most; infinite where
    one of them is no number."""
    found_T2, truth_T2 = found_T2.double(), truth_T2.double()
    apart_T2 = torch.where(found_T2 == truth_T2, 0, (found_T2 - truth_T2).abs()).nan_to_num(torch.inf)
    some = min(SOME, len(apart_T2))
    return float(apart_T2.unfold(0, some, 1).median(-1).values.max())


def allowed_difference(noise: float, truth_T2: Tensor) -> float:
    """What rounding explains: that of the layers, of which the noise is a unit in the last place each, and of
    the log-probabilities, which are computed in float32."""
    size = float(truth_T2[truth_T2.isfinite()].abs().max().clamp(min=1))
    return LAYER_ULPS * noise + LOGPROB_ULPS * torch.finfo(torch.float32).eps * size


@dataclass(frozen=True)
class Found:
    """What one way of computing the rows gives."""

    difference: float
    """From the truth, in nats; infinite if a pass fails."""
    error: str | None = None

    def within(self, allowed: float) -> bool:
        return self.difference <= allowed

    @property
    def words(self) -> str:
        return f"a pass fails ({self.error})" if self.error else f"at most {self.difference:.1g} nats off"


@dataclass(frozen=True)
class ModelProbe:
    """The rows, their true values, and the ways to compute them."""

    model: Any
    device: torch.device
    rows: Sequence[Row]
    truths: Sequence[Tensor]
    """log p and entropy [T, 2] of each row."""
    columns: int
    """The number of the model's logits."""
    allowed: float
    """The largest difference that rounding explains, in nats."""

    def alone(self) -> Found:
        """Each row in a pass of its own, as the trainer computes it."""

        def found() -> float:
            return max(
                self._difference([number], Packing.ONE_ROW, shares=False) for number in range(len(self.rows))
            )

        return _tried(found)

    def packed(self, packing: Packing, shares: bool) -> Found:
        """All rows in one pass; with `shares`, their common prefix is in it once."""
        return _tried(lambda: self._difference(range(len(self.rows)), packing, shares))

    def without_later_tokens(self) -> Found:
        """A row whose last quarter is another one: the values before it must not change."""
        row, truth_T2 = self.rows[-1], self.truths[-1]
        kept = 3 * len(row) // 4
        ids_L = np.concatenate([row.ids_L[:kept], np.roll(row.ids_L[kept:], 1)])

        def found() -> float:
            other = replace(row, ids_L=ids_L)
            seen_T2 = own_scores(own_logits(self.model, other, self.device), other)
            return difference(seen_T2[: kept - 1], truth_T2[: kept - 1])

        return _tried(found)

    def _difference(self, numbers: Sequence[int], packing: Packing, shares: bool) -> float:
        rows = [self.rows[number] for number in numbers]
        far = far_position(self.model) if len(rows) > 1 else None
        rows += [] if far is None else [far_row()]
        (batch,) = micro_batches(rows, sum(map(len, rows)), shares)
        if far is not None:
            batch = _moved(batch, far)
        lp_T, entropy_T, _ = scores(self.model, batch, packing, self.device)
        order = dict.fromkeys(batch.rows_T.tolist())
        truth_T2 = torch.cat([self.truths[numbers[row]] for row in order])
        return difference(torch.stack([lp_T, entropy_T], 1), truth_T2)


def _moved(batch: MicroBatch, far: int) -> MicroBatch:
    """The micro-batch with the positions of its far row from `far` on."""
    positions_N, ends_S = batch.positions_N.copy(), batch.lengths_S.cumsum()
    end = int(ends_S[batch.lengths_S == FAR_TOKENS][0])
    positions_N[end - FAR_TOKENS : end] += far
    return replace(batch, positions_N=positions_N)


def probe_of(model: Any, layers: Sequence[Any], device: torch.device) -> ModelProbe:
    """Make a probe. Raises what the model raises if it cannot compute a row alone."""
    rows = probe_rows(model)
    logits = [own_logits(model, row, device) for row in rows]
    truths = [own_scores(*pair) for pair in zip(logits, rows, strict=True)]
    if any(truth_T2.isnan().any() for truth_T2 in truths):
        raise ValueError("it gives NaN, so its weights are not finite, or too large for their type")
    with rounded_once_more(model, layers):
        noisy_T2 = own_scores(own_logits(model, rows[-1], device), rows[-1])
    allowed = allowed_difference(difference(noisy_T2, truths[-1]), torch.cat(truths))
    return ModelProbe(model, device, rows, truths, logits[0].shape[-1], allowed)


def _tried(found: Callable[[], float]) -> Found:
    try:
        return Found(found())
    except Exception as error:  # whatever the model's code raises
        return Found(torch.inf, first_words(error))
