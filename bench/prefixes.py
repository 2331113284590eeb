"""The cost of rows that share a prompt: separate rows, and rows with the prompt computed once.

python -m bench.prefixes [--prompt TOKENS] [--answer TOKENS] [--rollouts N] [--width N]

A forward and a backward pass of a random Qwen3 (4 layers, vocabulary 4,096) in float32, on one thread.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.measuring import print_facts, reset_peak, resident_mib, timed
from bench.policies import make_policy, row_of
from bench.rollouts import SyntheticRollout
from trainer_service.model.attention.packed_attention import packing_of
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.rows.rows import Row, micro_batches

LAYERS, VOCABULARY, HEAD = 4, 4096, 64


def rows_of_a_group(prompt: int, answer: int, rollouts: int) -> list[Row]:
    draw = np.random.default_rng(0)
    shared = draw.integers(VOCABULARY, size=prompt).tolist()
    answers = draw.integers(VOCABULARY, size=(rollouts, answer)).tolist()
    return [
        row_of(SyntheticRollout(shared, ids, float(draw.normal()), []), f"s{number}")
        for number, ids in enumerate(answers)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"prompt": 4096, "answer": 256, "rollouts": 16, "width": 768}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": given.width,
        "intermediate_size": 3 * given.width,
        "num_hidden_layers": LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "num_attention_heads": given.width // HEAD,
        "num_key_value_heads": max(1, given.width // HEAD // 3),
        "head_dim": HEAD,
    }
    with tempfile.TemporaryDirectory() as directory:
        make_policy(Path(directory), shape)
        model = load_model(Path(directory), torch.float32)
    rows = rows_of_a_group(given.prompt, given.answer, given.rollouts)
    most = given.prompt + given.answer * given.rollouts

    def learn(share_prefixes: bool) -> float:
        model.zero_grad()
        for batch in micro_batches(rows, most, share_prefixes):
            lp_T, *_ = scores(model, batch, packing_of(model), torch.device("cpu"))
            (lp_T * torch.from_numpy(batch.advantages_T)).sum().backward()  # type: ignore[no-untyped-call]
        return float(torch.stack([each.grad.norm() for each in model.parameters()]).norm())

    learn(True)
    for share_prefixes in (False, True):
        reset_peak()
        before = resident_mib()
        norm, cpu_s = timed(lambda: learn(share_prefixes))  # noqa: B023 - called at once
        computed = sum(len(batch.ids_N) for batch in micro_batches(rows, most, share_prefixes))
        peak_mib = resident_mib(peak=True) - before
        print_facts(
            shared=share_prefixes, computed=computed, cpu_s=cpu_s, peak_mib=peak_mib, gradient_norm=norm
        )


if __name__ == "__main__":
    main()
