"""One pass of a model over packed rows: what it says of the tokens that are trained.

MicroBatch ─ attention row by row ─▶ hidden states ─ those that predict a trained token ─▶ log p, entropy
"""

from typing import Any

import torch
from torch import Tensor

from trainer_service.algorithms.logits import entropies, selected_logprobs
from trainer_service.model.logprob_head import asking
from trainer_service.model.packed_attention import Packing, told
from trainer_service.rows.rows import MicroBatch


def forward(
    model: Any, batch: MicroBatch, packing: Packing, device: torch.device, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """log p [T] of the trained tokens, and the entropies [T], with a gradient when asked.

    Raises RuntimeError when the model loses on the way which rows there are.
    """
    if packing is Packing.ALONE and len(batch.lengths_S) > 1:
        rows = [forward(model, row, packing, device, entropy_gradient) for row in batch.apart()]
        lp, entropy = zip(*rows, strict=True)
        return torch.cat(lp), torch.cat(entropy)
    targets_T = torch.from_numpy(batch.targets_T).to(device)
    temperatures_T = torch.from_numpy(batch.temperatures_T).to(device)
    rows_told = told(packing, batch.lengths_S.tolist(), device)
    with asking(targets_T, temperatures_T, entropy_gradient) as asked:
        made_1TV = model(
            input_ids=torch.from_numpy(batch.ids_N).to(device)[None],
            position_ids=torch.from_numpy(batch.positions_N).to(device)[None],
            logits_to_keep=torch.from_numpy(batch.predict_at_T).to(device),
            use_cache=False,
            **rows_told,
        ).logits
    if "segments" in rows_told and not rows_told["segments"].heard:
        raise RuntimeError(f"{type(model).__name__} does not tell its attention which rows are packed")
    if asked.head is None:
        lp_T, entropy_T = selected_logprobs(made_1TV[0], targets_T, temperatures_T)
        return lp_T, entropies(made_1TV[0], temperatures_T) if entropy_gradient else entropy_T
    if not asked.head.trusts(made_1TV, asked.answer_1T2):
        return forward(model, batch, packing, device, entropy_gradient)
    lp_T, entropy_T = made_1TV[0].unbind(-1)
    return lp_T, entropy_T if entropy_gradient else entropy_T.detach()
