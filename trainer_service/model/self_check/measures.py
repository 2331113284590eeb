"""The model's own values for a row alone, and what rounding may change of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer_service.algorithms.logits import selected_logprobs
from trainer_service.rows.rows import Row

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
