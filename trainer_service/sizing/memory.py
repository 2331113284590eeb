"""The memory of a GPU that training takes, as arithmetic, and the largest micro-batch that fits.

    memory of the GPU = reserve + what is kept between passes + chunk of logits + tokens · bytes of a token
                                  weights, gradients,
                                  optimizer, buckets

The bytes of a token are an upper bound for the decoders of transformers with gated layers (Llama, Mistral,
Qwen2, Qwen3). A test compares them with what torch keeps for the backward pass.
"""

from dataclasses import dataclass

from trainer_service.model.head.sampled_logprobs import CHUNK_SHARE

RESERVE = 0.1
"""The share of the memory that is left free, for fragments and for buffers of libraries."""
CONTEXT = 1.5e9
"""The bytes of the CUDA context and of NCCL's buffers."""
BUCKET = 500_000_000
"""The number of gradients that DeepSpeed reduces at once, by default."""
LIVE = 1_000_000_000
"""The number of weights that stage 3 keeps gathered, by default."""
ENOUGH_TOKENS, MOST_TOKENS, STEP = 8192, 16_384, 1024
"""Micro-batches of `ENOUGH_TOKENS` keep a GPU busy. `MOST_TOKENS` is the largest that is chosen, because the
trainer waits for a full micro-batch before it learns early. Choices are multiples of `STEP`."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that decide how much memory it takes. Widths are in values per token."""

    parameters: int
    adapters: int
    """The parameters of LoRA adapters; 0 without LoRA, where all parameters are trained."""
    layers: int
    hidden: int
    queries: int
    """The width of all heads together; `keys` is that of the key heads."""
    keys: int
    intermediate: int
    vocabulary: int

    @property
    def trained(self) -> int:
        return self.adapters or self.parameters


@dataclass(frozen=True)
class Partition:
    """How the training uses its GPUs."""

    ranks: int
    stage: int
    """The stage that DeepSpeed runs: ModelSettings.sharding_stage."""
    half: bool
    """Whether passes use bfloat16."""
    offloads_optimizer: bool = False
    keeps_reference: bool = False
    """Whether a copy of the base model stays on the GPUs."""
    has_critic: bool = False

    @property
    def share_of_weights(self) -> float:
        """The part of each weight that a rank keeps."""
        return 1 / self.ranks if self.stage == 3 else 1

    @property
    def value_bytes(self) -> int:
        return 2 if self.half else 4


class DoesNotFit(Exception):
    """The training takes more memory than the GPU has."""


@dataclass(frozen=True)
class Fit:
    """The choice, and the bytes that it was made from."""

    recomputes: bool
    max_tokens: int
    kept: float
    of_token: float


def fit(
    shape: ModelShape,
    use: Partition,
    memory: float,
    recomputes: bool | None = None,
    max_tokens: int | None = None,
    longest_row: int = 0,
) -> Fit:
    """Choose activation checkpointing and the tokens of a micro-batch, if they are None. Activations are kept
    if a GPU stays busy with the tokens that fit then, and the longest row fits as well.

    Raises DoesNotFit if less than a micro-batch of `STEP` tokens fits.
    """
    kept = kept_bytes(shape, use)
    room = memory * (1 - RESERVE - CHUNK_SHARE) - CONTEXT - kept
    fits = {each: room / token_bytes(shape, use, each) for each in (False, True)}
    if recomputes is None:
        recomputes = fits[False] < (max_tokens or max(ENOUGH_TOKENS, longest_row))
    of_token = token_bytes(shape, use, recomputes)
    if fits[recomputes] < (max_tokens or STEP):
        raise DoesNotFit(
            f"weights, gradients and optimizer take {kept / 1e9:.1f} GB on each GPU, and a micro-batch of "
            f"{max_tokens or STEP} tokens {(max_tokens or STEP) * of_token / 1e9:.1f} GB"
        )
    largest = min(MOST_TOKENS, int(fits[recomputes] // STEP * STEP))
    return Fit(recomputes, max_tokens or largest, kept, of_token)


def kept_bytes(shape: ModelShape, use: Partition) -> float:
    """The bytes on each GPU between two passes, and those of buffers whose size does not depend on tokens."""
    own = _trained_model_bytes(shape.parameters, shape.trained, use)
    critic = _trained_model_bytes(shape.parameters, shape.parameters, use) if use.has_critic else 0.0
    reference = use.value_bytes * shape.parameters * use.share_of_weights if use.keeps_reference else 0
    # The gradient of the head is summed in float32, and then converted.
    head = 0 if shape.adapters else (4 + use.value_bytes) * shape.vocabulary * shape.hidden
    return own + critic + reference + head


def _trained_model_bytes(parameters: int, trained: int, use: Partition) -> float:
    width, part = use.value_bytes, 1 / use.ranks
    weights = width * parameters * use.share_of_weights
    if use.stage == 3:
        weights += width * min(parameters, LIVE)
    # Gradients of bfloat16 are added up in float32. From stage 2 on, each rank keeps its part of them.
    gradients = 4 * trained * (part if use.stage >= 2 else 1)
    # AdamW keeps two values for each weight; from stage 1 on, DeepSpeed keeps the weight in float32, too.
    optimizer = 12 * trained * part if use.stage else 8 * trained
    if use.offloads_optimizer:
        optimizer, gradients = 0, gradients if use.stage < 2 else 0
    # Two buckets, because one is filled while the other is reduced, and one in float32 to reduce.
    buckets = min(trained, BUCKET) * (2 * width + 4) if use.stage else 0
    return weights + gradients + optimizer + buckets


def token_bytes(shape: ModelShape, use: Partition, recomputes: bool) -> float:
    """The bytes of activations for each token of a micro-batch, and of their gradients in one layer."""
    layer = _layer_bytes(shape, use.half)
    around = 10 * use.value_bytes * shape.hidden  # embeddings, last norm, and the head's input
    if recomputes:  # each layer keeps its input, and one layer at a time keeps all
        return shape.layers * use.value_bytes * shape.hidden + 2 * layer + around
    return (shape.layers + 1) * layer + around


def _layer_bytes(shape: ModelShape, half: bool) -> int:
    """What one layer keeps for the backward pass: the norms' inputs in float32 and their outputs, queries and
    keys before and after norm and rotation, values, the attention's output, and four values of the MLP. In
    float32, attention on CUDA also keeps keys and values that are repeated for each query head."""
    if half:
        return 16 * shape.hidden + 13 * shape.queries + 11 * shape.keys + 8 * shape.intermediate
    return 24 * shape.hidden + 29 * shape.queries + 17 * shape.keys + 16 * shape.intermediate
