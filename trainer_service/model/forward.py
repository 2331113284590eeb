"""Makes a forward pass over packed rows: computes log-probabilities and entropies of the trained tokens.

MicroBatch ─ attention row by row ─▶ hidden states ─ those that predict a trained token ─▶ log p, entropy
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer_service.algorithms.logits import entropies, selected_logprobs
from trainer_service.model.logprob_head import requesting_logprobs
from trainer_service.model.packed_attention import Packing, attention_arguments
from trainer_service.model.routers import Routers
from trainer_service.rows.rows import MicroBatch


def forward(
    model: Any,
    batch: MicroBatch,
    packing: Packing,
    device: torch.device,
    entropy_gradient: bool = False,
    routers: Routers | None = None,
) -> tuple[Tensor, Tensor]:
    """log p [T] and entropies [T] of the trained tokens, in nats. log p has a gradient, the entropies only if
    `entropy_gradient`. With the model's `routers`, the pass replays the experts of the micro-batch.

    Raises RuntimeError if the model does not pass the bounds of the rows to its attention.
    """
    if packing is Packing.ONE_ROW and len(batch.lengths_S) > 1:
        rows = [
            forward(model, row, packing, device, entropy_gradient, routers) for row in batch.single_rows()
        ]
        lp, entropy = zip(*rows, strict=True)
        return torch.cat(lp), torch.cat(entropy)
    targets_T = torch.from_numpy(batch.targets_T).to(device)
    temperatures_T = torch.from_numpy(batch.temperatures_T).to(device)
    attention = attention_arguments(packing, batch.lengths_S.tolist(), device)
    routing = nullcontext() if routers is None else routers.routing(batch, device)
    with requesting_logprobs(targets_T, temperatures_T, entropy_gradient) as request, routing:
        output_1TV = model(
            input_ids=torch.from_numpy(batch.ids_N).to(device)[None],
            position_ids=torch.from_numpy(batch.positions_N).to(device)[None],
            logits_to_keep=torch.from_numpy(batch.predict_at_T).to(device),
            use_cache=False,
            **attention,
        ).logits
    segments = attention.get("segments")
    if segments is not None and not segments.reached_attention:
        raise RuntimeError(f"{type(model).__name__} does not pass the bounds of packed rows to its attention")
    if request.head is None:
        lp_T, entropy_T = selected_logprobs(output_1TV[0], targets_T, temperatures_T)
        return lp_T, entropies(output_1TV[0], temperatures_T) if entropy_gradient else entropy_T
    if not request.head.was_unchanged(output_1TV, request.result_1T2):
        return forward(model, batch, packing, device, entropy_gradient, routers)
    lp_T, entropy_T = output_1TV[0].unbind(-1)
    return lp_T, entropy_T if entropy_gradient else entropy_T.detach()
