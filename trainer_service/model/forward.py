"""Makes a forward pass over packed rows: computes log-probabilities and entropies of the trained tokens.

MicroBatch ─ attention row by row ─▶ hidden states ─ those that predict a trained token ─▶ log p, entropy
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_service.model.images import ImageInputs
from trainer_service.model.logprob_head import entropies, requesting_logprobs, selected_logprobs
from trainer_service.model.packed_attention import AttentionArguments, Packing, attention_arguments
from trainer_service.model.parallel import SequenceRanks, Slice
from trainer_service.model.routers import Routers
from trainer_service.rows.rows import MicroBatch

NO_IMAGES: Mapping[str, Tensor] = {}


class TokenScores(NamedTuple):
    """What a pass computes for T trained tokens, in nats. The log-probabilities have a gradient, the
    entropies only if they are asked for with one."""

    lp_T: Tensor
    entropy_T: Tensor
    top_TK: Tensor | None = None
    """Log-probabilities of the teacher's most probable tokens, if the micro-batch has them."""


def scores(
    model: Any,
    batch: MicroBatch,
    packing: Packing,
    device: torch.device,
    entropy_gradient: bool = False,
    sequence: SequenceRanks | None = None,
    routers: Routers | None = None,
    images: ImageInputs | None = None,
) -> TokenScores:
    """The scores of the trained tokens. The ranks of `sequence` call it together; all get the same values.
    With the model's `routers`, the pass replays the experts of the micro-batch.

    Raises RuntimeError if the model does not pass the bounds of the rows to its attention, and if the rows
    show images that the model does not read.
    """
    if batch.images and images is None:
        raise RuntimeError(f"{type(model).__name__} does not read the images of these rows")
    if packing is Packing.ONE_ROW and len(batch.lengths_S) > 1:
        rows = [
            scores(model, row, packing, device, entropy_gradient, routers=routers, images=images)
            for row in batch.single_rows()
        ]
        lp, entropy, top = zip(*rows, strict=True)
        return TokenScores(torch.cat(lp), torch.cat(entropy), torch.cat(top) if batch.teacher_top else None)
    attention = attention_arguments(packing, batch, device, sequence)
    if sequence is None:
        with nullcontext() if routers is None else routers.routing(batch, device):
            shown: AbstractContextManager[Mapping[str, Tensor]] = (
                nullcontext(NO_IMAGES) if images is None else images.given_to(model, batch, device)
            )
            with shown as inputs:
                scored_TK = _scored(model, batch, attention, device, entropy_gradient, inputs)
    else:
        part = sequence.slice_of(batch)
        own_TK = _scored(model, part, attention, device, entropy_gradient)
        scored_TK = sequence.whole(own_TK, part, len(batch.targets_T))
    segments = attention.get("segments")
    if segments is not None and not segments.reached_attention:
        raise RuntimeError(f"{type(model).__name__} does not pass the bounds of packed rows to its attention")
    entropy_T = scored_TK[:, -1] if entropy_gradient else scored_TK[:, -1].detach()
    return TokenScores(scored_TK[:, 0], entropy_T, scored_TK[:, 1:-1] if batch.teacher_top else None)


def _scored(
    model: Any,
    part: MicroBatch | Slice,
    attention: AttentionArguments,
    device: torch.device,
    entropy_gradient: bool,
    inputs: Mapping[str, Tensor] = NO_IMAGES,
) -> Tensor:
    """[T, K + 2] of the tokens that this part predicts: log p of each, log p of the teacher's K most probable
    tokens in its place, and the entropy. K is 0 without them. `inputs` are those of images."""
    ids_TK = part.targets_T[:, None]
    if part.teacher_top is not None:
        ids_TK = np.concatenate([ids_TK, part.teacher_top.ids_TK], 1)
    targets_TK = torch.from_numpy(ids_TK).to(device)
    temperatures_T = torch.from_numpy(part.temperatures_T).to(device)
    positions_1N = torch.from_numpy(part.positions_N).to(device)[None]
    with requesting_logprobs(targets_TK, temperatures_T, entropy_gradient) as request:
        output_1TV = model(
            input_ids=torch.from_numpy(part.ids_N).to(device)[None],
            logits_to_keep=torch.from_numpy(part.predict_at_T).to(device),
            use_cache=False,
            **({"position_ids": positions_1N} | dict(inputs)),
            **attention,
        ).logits
    if request.head is None:
        if output_1TV.shape[1] != len(targets_TK):
            raise ValueError(f"{type(model).__name__} does not support `logits_to_keep`")
        lp_TK, entropy_T = selected_logprobs(output_1TV[0], targets_TK, temperatures_T)
        if entropy_gradient:
            entropy_T = entropies(output_1TV[0], temperatures_T)
        return torch.cat([lp_TK, entropy_T[:, None]], -1)
    if not request.head.was_unchanged(output_1TV, request.result_1TK):
        return _scored(model, part, attention, device, entropy_gradient, inputs)
    scored_TK: Tensor = output_1TV[0]
    return scored_TK
