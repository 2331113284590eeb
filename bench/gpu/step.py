"""One optimizer step of the trainer on its device, in a process of its own.

python -m bench.gpu.step MODEL DEVICE TOKENS     prints its figures as JSON
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu.checks import peak_bytes
from bench.measuring import print_facts
from bench.policies import rows_of
from bench.rollouts import drawn, small, tokens
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.settings import TrainerSettings
from trainer_service.sizing import find_gpu, fit, partition_of, resolved, shape_of
from trainer_service.step.optimizer_step import OptimizerSteps
from trainer_service.step.step_parts import StepRequest

PLAIN: dict[str, Any] = {"correction": "none", "masks": []}
"""The rollouts have no log-probabilities of an engine, so nothing may depend on them."""


def main(arguments: list[str]) -> None:
    model, device, wanted = Path(arguments[0]), arguments[1], int(arguments[2])
    given = TrainerSettings.model_validate({"model_path": model, "device": device, "algorithm": PLAIN})
    gpu = find_gpu(given)
    settings = resolved(given, gpu, ranks=1)
    where = torch.device("cuda", 0) if gpu else torch.device("cpu")
    # The step that is measured finds all memory allocated, and rows of lengths that are new to it.
    before, rollouts = (
        drawn(64, 500, median=wanted // 128, longest=wanted // 8, seed=seed) for seed in (201, 200)
    )
    facts: dict[str, float] = {}

    def train() -> None:
        policy = DeepSpeedPolicy(settings)
        steps = OptimizerSteps(policy)
        for some in (small(rollouts), before, rollouts):
            facts["first_s"], began = facts.get("wall_s", 0.0), time.monotonic()
            facts.update(steps.step(StepRequest(rows_of(some), 0, settings.algorithm)))
            facts["wall_s"] = time.monotonic() - began

    used = peak_bytes(where, train)
    counted = 0.0
    shape = shape_of(model)
    if gpu is not None:
        found = fit(shape, partition_of(settings, 1), gpu.memory, settings.recomputes_activations)
        counted = found.kept + min(found.max_tokens, tokens(rollouts)) * found.of_token + gpu.memory / 32
    print_facts(
        tokens=tokens(rollouts),
        wall_s=facts["wall_s"],
        first_s=facts["first_s"],
        max_tokens=settings.algorithm.micro_batch_tokens,
        recomputes=settings.recomputes_activations,
        gradient_norm=facts["grad_norm"],
        parameters=shape.parameters,
        peak_bytes=used,
        counted_bytes=counted,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
