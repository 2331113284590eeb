"""Makes a forward pass over packed rows: computes log-probabilities and entropies of the trained tokens.

MicroBatch ─ attention row by row ─▶ hidden states ─ those that predict a trained token ─▶ log p, entropy
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer_service.algorithms.logits import entropies, selected_logprobs
from trainer_service.model.attention.packed_attention import AttentionArguments, Packing, attention_arguments
from trainer_service.model.logprob_head import requesting_logprobs
from trainer_service.model.routers import Routers
from trainer_service.model.sharding.sequence_ranks import SequenceRanks, Slice
from trainer_service.rows.rows import MicroBatch


def forward(
    model: Any,
    batch: MicroBatch,
    packing: Packing,
    device: torch.device,
    entropy_gradient: bool = False,
    sequence: SequenceRanks | None = None,
    routers: Routers | None = None,
) -> tuple[Tensor, Tensor]:
    """log p [T] and entropies [T] of the trained tokens, in nats. log p has a gradient, the entropies only if
    `entropy_gradient`. The ranks of `sequence` call it together; all get the same values. With the model's
    `routers`, the pass replays the experts of the micro-batch.

    Raises RuntimeError if the model does not pass the bounds of the rows to its attention.
    """
    if packing is Packing.ONE_ROW and len(batch.lengths_S) > 1:
        rows = [
            forward(model, row, packing, device, entropy_gradient, routers=routers)
            for row in batch.single_rows()
        ]
        lp, entropy = zip(*rows, strict=True)
        return torch.cat(lp), torch.cat(entropy)
    attention = attention_arguments(packing, batch, device, sequence)
    if sequence is None:
        with nullcontext() if routers is None else routers.routing(batch, device):
            scored_T2 = _scored(model, batch, attention, device, entropy_gradient)
    else:
        part = sequence.slice_of(batch)
        own_T2 = _scored(model, part, attention, device, entropy_gradient)
        scored_T2 = sequence.whole(own_T2, part, len(batch.targets_T))
    segments = attention.get("segments")
    if segments is not None and not segments.reached_attention:
        raise RuntimeError(f"{type(model).__name__} does not pass the bounds of packed rows to its attention")
    lp_T, entropy_T = scored_T2.unbind(-1)
    return lp_T, entropy_T if entropy_gradient else entropy_T.detach()


def _scored(
    model: Any,
    part: MicroBatch | Slice,
    attention: AttentionArguments,
    device: torch.device,
    entropy_gradient: bool,
) -> Tensor:
    """log p and entropies [T, 2] of the tokens that this part predicts."""
    targets_T = torch.from_numpy(part.targets_T).to(device)
    temperatures_T = torch.from_numpy(part.temperatures_T).to(device)
    with requesting_logprobs(targets_T, temperatures_T, entropy_gradient) as request:
        output_1TV = model(
            input_ids=torch.from_numpy(part.ids_N).to(device)[None],
            position_ids=torch.from_numpy(part.positions_N).to(device)[None],
            logits_to_keep=torch.from_numpy(part.predict_at_T).to(device),
            use_cache=False,
            **attention,
        ).logits
    if request.head is None:
        lp_T, entropy_T = selected_logprobs(output_1TV[0], targets_T, temperatures_T)
        if entropy_gradient:
            entropy_T = entropies(output_1TV[0], temperatures_T)
        return torch.stack([lp_T, entropy_T], -1)
    if not request.head.was_unchanged(output_1TV, request.result_1T2):
        return _scored(model, part, attention, device, entropy_gradient)
    scored_T2: Tensor = output_1TV[0]
    return scored_T2
