"""Two optimizer steps of a tiny model in each way to train it, in a process of its own.

python -m bench.gpu.trainings TEXT_MODEL IMAGE_MODEL DEVICE [float32]    prints the figures of each as JSON

With float32, all ways are computed in it.

On a GPU, each training begins with rows that do not fit into the memory, and goes on without them.
"""

import gc
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.gpu.checks import Check
from bench.gpu.images import image_rows
from bench.measuring import print_facts
from bench.policies import rows_of
from bench.rollouts import SyntheticRollout, drawn
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.settings import TrainerSettings
from trainer_service.step.optimizer_step import OptimizerSteps
from trainer_service.step.step_attempts import OutOfMemory
from trainer_service.step.step_parts import StepRequest

LR = 1e-3
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "activation_checkpointing": False,
    "optimizer": {"lr": LR, "warmup_steps": 0},
    "algorithm": {"correction": "none", "masks": [], "max_tokens": 1024},
}
"""The rows have no log-probabilities of an engine, so nothing may depend on them."""
HALF = {"dtype": "bfloat16"}
SHARED: dict[str, Any] = {"memory": "shared", "shared_with": ["http://nowhere"]}
WAYS: Mapping[str, Mapping[str, Any]] = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in (0, 1, 2, 3)},
    **{f"stage {stage}, bfloat16": {"zero_stage": stage, **HALF} for stage in (1, 2, 3)},
    "recomputed activations": {"activation_checkpointing": True, **HALF},
    "recomputed activations, stage 3": {"activation_checkpointing": True, "zero_stage": 3, **HALF},
    "optimizer on the host": {"zero_stage": 2, "offload_optimizer": True, **HALF},
    "states on the host between steps": {**SHARED, **HALF},
    "adapters": {"lora": {"rank": 8}},
    "adapters, stage 3, bfloat16": {"lora": {"rank": 8}, "zero_stage": 3, **HALF},
    "images": {},
    "images, bfloat16": HALF,
    "images, recomputed activations": {"activation_checkpointing": True, **HALF},
    "images, adapters": {"lora": {"rank": 8}, **HALF},
}
"""The settings of each; float32 at stage 1 where they say nothing else."""
NORMS = {"float32": 1e-3, "bfloat16": 0.02}
"""The largest difference of a gradient's norm to that in float32 on CPU, as a share of it."""
LONG, MANY, SPARE = 16_384, 128, 6 * 2**30
"""Rows of LONG tokens, so MANY that they do not fit together, and the bytes that they have: enough for the
buffers of DeepSpeed, while activations take 6 KB or more for each token."""


def trainings(found: Mapping[str, Any], exact: Mapping[str, Any]) -> Iterator[Check]:
    """The checks of each way, from its figures and those of float32 on CPU."""
    for way, given in WAYS.items():
        what = f"two steps, {way}: norms of the gradient, to float32 on CPU; the largest move of a weight"
        allowed = NORMS[{**COMMON, **given}["dtype"]]
        expected = f"at most {allowed:g}; more than 0"
        error = found.get(f"{way}: error") or exact.get(f"{way}: error")
        if error is not None:
            yield Check(what, str(error), expected, False)
            continue
        apart = max(abs(found[key] - exact[key]) / exact[key] for key in (f"{way}: norm 0", f"{way}: norm 1"))
        moved = found[f"{way}: moved"]
        yield Check(what, f"{apart:.2g}; {moved:.2g}", expected, apart <= allowed and 0 < moved < 10)


def main(arguments: list[str]) -> None:
    text, sees, device = Path(arguments[0]), Path(arguments[1]), arguments[2]
    facts: dict[str, float | str] = {}
    for way, given in WAYS.items():
        path = sees if way.startswith("images") else text
        settings = {"model_path": path, "device": device, **COMMON, **given}
        if arguments[3:]:
            settings["dtype"] = arguments[3]
        try:
            facts |= _trained(TrainerSettings.model_validate(settings), way)
        except Exception as error:
            traceback.print_exc()
            facts[f"{way}: error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    print_facts(**facts)


def _trained(settings: TrainerSettings, way: str) -> dict[str, float | str]:
    policy = DeepSpeedPolicy(settings)
    rows = image_rows(policy.images.rule) if policy.images else rows_of(drawn(12, 500, 60, 400, seed=1))
    facts: dict[str, float | str] = {}
    if settings.device == "cuda":
        _run_out_of_memory(policy, settings)
    for number in range(2):
        request = StepRequest(rows, number, settings.algorithm)
        facts[f"{way}: norm {number}"] = OptimizerSteps(policy).step(request)["grad_norm"]
        if settings.memory == "shared":
            policy.offload_states()
            policy.reload_states()
    base = load_file(settings.model_path / "model.safetensors")
    moves = [
        float((each.value.float() - base[each.name].float()).abs().max())
        for each in policy.snapshot().tensors
    ]
    facts[f"{way}: moved"] = max(moves)
    torch.cuda.empty_cache()  # without a GPU it does nothing
    return facts


def _run_out_of_memory(policy: DeepSpeedPolicy, settings: TrainerSettings) -> None:
    """Try rows that do not fit into what this process may have. Raises RuntimeError if they fit."""
    gc.collect()  # of the training before
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + SPARE) / total)
    fitting = rows_of(drawn(1, 500, 60, 400, seed=1))
    # Rows that begin alike would be computed once.
    long = rows_of([SyntheticRollout([3 + number], [7] * (LONG - 1), 1.0, []) for number in range(MANY)])
    algorithm = settings.algorithm.model_copy(update={"max_tokens": LONG * MANY})
    steps = OptimizerSteps(policy)
    try:
        steps.accumulate(StepRequest(fitting, 0, algorithm))
        steps.accumulate(StepRequest(long, 0, algorithm))
    except OutOfMemory:
        return
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    raise RuntimeError(f"{LONG * MANY} tokens fit into {SPARE} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
