"""The output head with adapters: their part of the logits is computed in the same chunks as its own."""

from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor

from trainer_service.model.logprob_head import LowRank


class AdaptedHead(Linear):
    """PEFT's layer around a `LogprobHead`, which PEFT itself would call for logits only."""

    def forward(self, hidden_1TH: Tensor) -> Tensor:
        head: Any = self.base_layer
        low_rank = None
        for name in self.active_adapters:  # one at most
            if name in self.lora_A:
                outward: Any = self.lora_B[name]  # stage 3 of ZeRO gathers its weight when it is asked for
                low_rank = LowRank(self.lora_A[name](hidden_1TH) * self.scaling[name], outward.weight)
        result: Tensor = head(hidden_1TH, low_rank)
        return result
