"""Makes a random Qwen3 to train, and computes its log-probabilities of rollouts.

python -m bench.policies small|whole DIRECTORY ROLLOUTS     makes the model, and adds its logprobs to the
rollouts"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.measuring import print_facts
from bench.rollouts import SyntheticRollout, read, write
from tests.support.tiny_model import make_tiny_model
from trainer_service.model.attention.packed_attention import packing_of
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.rows.rows import Row, micro_batches

PACK_TOKENS = 1024
WHOLE: dict[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "layer_types": ["full_attention"] * 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""About 100 million parameters."""


def make_policy(directory: Path, shape: Mapping[str, object]) -> int:
    """Make a model of this shape with the tiny model's tokenizer, which is enough for random tokens. Returns
    the number of weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_tiny_model(directory)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(directory, **shape))
    model.save_pretrained(directory)
    return int(model.num_parameters())


def row_of(rollout: SyntheticRollout, name: str) -> Row:
    """The row that the trainer makes of a session with one turn."""
    prompt, length = len(rollout.prompt), len(rollout)
    mask = np.array([0] * prompt + [1] * len(rollout.completion))
    logprobs = rollout.logprobs or [0.0] * len(rollout.completion)
    return Row(
        session_id=name,
        turn_ids=(f"{name}/0",),
        advantage=rollout.advantage,
        ids_L=np.array(rollout.prompt + rollout.completion),
        mask_L=mask,
        logprobs_L=np.array([0.0] * prompt + logprobs, np.float32),
        versions_L=np.where(mask == 1, 0, -1),
        temperatures_L=np.ones(length, np.float32),
        turns_L=np.where(mask == 1, 0, -1),
        rewards_L=np.zeros(length, np.float32),
    )


def rows_of(rollouts: list[SyntheticRollout]) -> list[Row]:
    return [row_of(rollout, f"rollout-{index}") for index, rollout in enumerate(rollouts)]


@torch.no_grad()
def with_logprobs(rollouts: list[SyntheticRollout], directory: Path) -> list[SyntheticRollout]:
    """The rollouts with the log-probabilities of the model in `directory`, as if it had sampled them."""
    model = load_model(directory, torch.float32)
    known: dict[int, list[float]] = {}
    for batch in micro_batches(rows_of(rollouts), PACK_TOKENS):
        logprobs_T, *_ = scores(model, batch, packing_of(model), torch.device("cpu"))
        for row in set(batch.rows_T.tolist()):
            known[row] = logprobs_T[torch.from_numpy(batch.rows_T == row)].tolist()
    return [replace(rollout, logprobs=known[index]) for index, rollout in enumerate(rollouts)]


def main(arguments: list[str]) -> None:
    size, directory, file = arguments[0], *map(Path, arguments[1:])
    torch.set_num_threads(1)
    weights = make_policy(directory, WHOLE if size == "whole" else {})
    write(with_logprobs(read(file), directory), file)
    print_facts(weights=weights)


if __name__ == "__main__":
    main(sys.argv[1:])
