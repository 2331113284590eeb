"""The critic's loss: the squared distance of its values from the returns.

`critic.value_clip` is a case of `algorithms_golden.json` in the tests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_service.algorithms.tokens import widened

VALUE_CLIP = 0.2


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss of a micro-batch, and the loss of each of its T tokens."""

    loss: Tensor
    """The scalar to differentiate: this micro-batch's share of the step's loss."""
    per_token_T: Tensor
    clipped_T: Tensor
    """bool: True where the clipped term is the larger one. Such a token has no gradient."""


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    *,
    tokens_in_step: int,
    clip: float | None = VALUE_CLIP,
) -> ValueLoss:
    """The sum of ½ · max((V - R)², (V_clipped - R)²) over the micro-batch's tokens, divided by the number of
    tokens in the whole step. V_clipped is V, clipped to V_old ± clip (PPO2 in OpenAI baselines, verl;
    `critic.value_clip`).

    The unit is the squared reward. `old_values_T` are the critic's values before the step, and `returns_T`
    are `Returns.returns_T`; neither gets a gradient. Without a clip, V_clipped is V."""
    values_T, old_values_T, returns_T = (widened(each) for each in (values_T, old_values_T, returns_T))
    old_values_T, returns_T = old_values_T.detach(), returns_T.detach()
    plain_T = (values_T - returns_T) ** 2
    if clip is None:
        bounded_T = plain_T
    else:
        bounded_T = (values_T.clamp(old_values_T - clip, old_values_T + clip) - returns_T) ** 2
    per_token_T = 0.5 * torch.maximum(plain_T, bounded_T)
    return ValueLoss(
        loss=per_token_T.sum() / tokens_in_step,
        per_token_T=per_token_T.detach(),
        clipped_T=(bounded_T > plain_T).detach(),
    )
