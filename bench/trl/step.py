"""One step of TRL's GRPOTrainer on given rollouts, without its generation and scoring.

python -m bench.trl.step WORKLOAD MODEL ROLLOUTS     bench/trl/requirements.txt lists its packages

It is made after a small step. All other settings are TRL's defaults, except the workload's type. bfloat16 is
that of torch's autocast: the weights are in float32.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from bench.measuring import print_step
from bench.rollouts import SyntheticRollout, read, small
from bench.workloads import WORKLOADS

ROWS_AT_ONCE = 8
"""TRL's default size of a micro-batch, and of a group."""


class GivenRollouts(GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer with given rollouts, one list for each step."""

    steps: list[list[SyntheticRollout]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, object]:
        rollouts = self.steps[self.state.global_step]
        prompts = [torch.tensor(rollout.prompt) for rollout in rollouts]
        completions = [torch.tensor(rollout.completion) for rollout in rollouts]
        completion_mask = pad([torch.ones_like(ids) for ids in completions], padding_value=0)
        trained = pad([torch.tensor(rollout.trained) for rollout in rollouts], padding_value=0)
        return {
            "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
            "prompt_mask": pad(
                [torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"
            ),
            "completion_ids": pad(completions, padding_value=0),
            "completion_mask": completion_mask,
            "tool_mask": trained,
            "advantages": torch.tensor([rollout.advantage for rollout in rollouts]),
            "num_items_in_batch": trained.sum(),
        }


class StepClock(TrainerCallback):  # type: ignore[misc]
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps_s.append(time.process_time() - self._began)


def main(arguments: list[str]) -> None:
    workload, model, file = arguments
    torch.set_num_threads(1)
    rollouts, clock = read(Path(file)), StepClock()
    at_once = min(ROWS_AT_ONCE, len(rollouts))
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            bf16=WORKLOADS[workload].dtype == "bfloat16",
            use_cpu=True,
            per_device_train_batch_size=at_once,
            num_generations=at_once,
            gradient_accumulation_steps=len(rollouts) // at_once,  # all in one step
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GivenRollouts(
            model=model,
            args=arguments,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list([{"prompt": "?"}] * len(rollouts)),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[clock],
        )
        trainer.steps = [small(rollouts), rollouts]
        trainer.train()
    norm = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry][-1]
    print_step(rollouts, clock.steps_s[-1], float(norm))


if __name__ == "__main__":
    main(sys.argv[1:])
