"""The workloads of the trainer's bench: a policy, the rollouts that it trains, and who trains them.

This module needs only the standard library, so that environments without Weir can read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from bench.rollouts import SyntheticRollout, drawn, group, sessions

SEED = 200
"""With this seed, 64 rollouts of `plain` have 18,873 tokens; the longest has 1,812."""
CPU_TOKENS = 1024
"""The trainer's default size of a micro-batch on CPU, in tokens."""
Shape = Mapping[str, object]
Draw = Callable[[], list[SyntheticRollout]]


@dataclass(frozen=True)
class Workload:
    """What each contender trains in one optimizer step."""

    what: str
    shape: Shape
    """What the policy's configuration has in place of the tiny model's. With `num_experts`, the policy is a
    Qwen3-MoE, else a Qwen3."""
    draw: Draw
    smoke: Draw
    """Fewer and shorter rollouts of the same kind, for a tiny model with a vocabulary of 1,000."""
    contenders: Sequence[str] = ("ours", "packed", "trl")
    slow_rollouts: int = 1024
    """How many of the rollouts the contenders get that pad to the longest of all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: int = CPU_TOKENS
    target: float = 0.95
    """The wanted speed of ours, as a multiple of that of `packed`."""

    @property
    def smoke_shape(self) -> Shape:
        """The tiny model's own shape."""
        return {"num_experts": 4} if "num_experts" in self.shape else {}


def _shape(layers: int, width: int, vocabulary: int = 4096, **more: object) -> Shape:
    heads = width // 64
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 3),
        "head_dim": 64,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        **more,
    }


HUNDRED_MILLION = _shape(12, 768, 32_000, intermediate_size=2048)
"""About so many parameters."""
_SMOKE = partial(drawn, 64, 1_000, median=24, longest=96, seed=SEED)
"""Three micro-batches, so that gradients are added up."""

WORKLOADS: Mapping[str, Workload] = {
    "plain": Workload(
        "64 rollouts of 16 to 2,048 tokens; 100M weights",
        HUNDRED_MILLION,
        partial(drawn, 64, 32_000, median=190, longest=2048, seed=SEED),
        _SMOKE,
        contenders=("ours", "packed", "padded", "padded-globally", "trl"),
        slow_rollouts=16,
    ),
    "long": Workload(
        "2 sessions of 32,768 tokens with 16 answers of 128 each; 2 layers, width 64",
        _shape(2, 64),
        partial(sessions, 2, 4096, length=32_768, turns=16, answer=128, seed=SEED),
        partial(sessions, 2, 1_000, length=256, turns=4, answer=16, seed=SEED),
    ),
    "rows": Workload(
        "1,024 rows of 16 to 256 tokens; 2 layers, width 256",
        _shape(2, 256),
        partial(drawn, 1024, 4096, median=32, longest=256, seed=SEED),
        partial(drawn, 64, 1_000, median=20, longest=32, seed=SEED),
        slow_rollouts=64,
    ),
    "shared": Workload(
        "16 answers of 256 tokens to one prompt of 4,096; 1 layer, width 768",
        _shape(1, 768, vocabulary=1024),
        partial(group, 16, 1024, prompt=4096, answer=256, seed=SEED),
        partial(group, 4, 1_000, prompt=64, answer=8, seed=SEED),
        slow_rollouts=4,
        micro_batch_tokens=8192,
        target=6,
    ),
    "moe": Workload(
        "64 rollouts of 16 to 2,048 tokens; Qwen3-MoE, 4 layers, width 256, 2 of 8 experts",
        _shape(4, 256, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2),
        partial(drawn, 64, 4096, median=190, longest=2048, seed=SEED),
        _SMOKE,
        slow_rollouts=16,
    ),
    "bf16": Workload(
        "64 rollouts of 16 to 512 tokens; bfloat16, 2 layers, width 128",
        _shape(2, 128),
        partial(drawn, 64, 4096, median=64, longest=512, seed=SEED),
        _SMOKE,
        slow_rollouts=16,
        dtype="bfloat16",
    ),
}
