"""Makes a random Qwen3 or Qwen3-MoE to train, and computes its log-probabilities of rollouts.

python -m bench.policies WORKLOAD whole|smoke DIRECTORY ROLLOUTS     makes the model, and adds its logprobs to
the rollouts"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.measuring import print_facts
from bench.rollouts import SyntheticRollout, read, write
from bench.workloads import WORKLOADS
from tests.support.tiny_model import make_tiny_experts, make_tiny_model
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.packed_attention import packing_of
from trainer_service.rows.rows import Row, micro_batches


def make_policy(directory: Path, shape: Mapping[str, object]) -> int:
    """Make a model of this shape with the tiny model's tokenizer, which is enough for random tokens. Returns
    the number of weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (make_tiny_experts if "num_experts" in shape else make_tiny_model)(directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, **shape))
    model.save_pretrained(directory)
    return int(model.num_parameters())


def row_of(rollout: SyntheticRollout, name: str) -> Row:
    """The row that the trainer makes of a session with one turn."""
    prompt, length = len(rollout.prompt), len(rollout)
    mask = np.array([0] * prompt + rollout.trained)
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
def with_logprobs(
    rollouts: list[SyntheticRollout], directory: Path, micro_batch_tokens: int
) -> list[SyntheticRollout]:
    """The rollouts with the log-probabilities of the model in `directory` in float32, as if it had sampled
    them."""
    model = load_model(directory, torch.float32)
    known: dict[int, list[float]] = {}
    for batch in micro_batches(rows_of(rollouts), micro_batch_tokens, share_prefixes=True):
        logprobs_T, *_ = scores(model, batch, packing_of(model), torch.device("cpu"))
        for row in set(batch.rows_T.tolist()):
            trained = iter(logprobs_T[torch.from_numpy(batch.rows_T == row)].tolist())
            known[row] = [next(trained) if each else 0.0 for each in rollouts[row].trained]
    return [replace(rollout, logprobs=known[index]) for index, rollout in enumerate(rollouts)]


def main(arguments: list[str]) -> None:
    workload, size = WORKLOADS[arguments[0]], arguments[1]
    directory, file = map(Path, arguments[2:])
    torch.set_num_threads(1)
    weights = make_policy(directory, workload.smoke_shape if size == "smoke" else workload.shape)
    write(with_logprobs(read(file), directory, workload.micro_batch_tokens), file)
    print_facts(weights=weights)


if __name__ == "__main__":
    main(sys.argv[1:])
