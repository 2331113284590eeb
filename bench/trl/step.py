"""One step of TRL's GRPOTrainer on given rollouts, without its generation and scoring.

python -m bench.trl.step MODEL ROLLOUTS     after a small step; bench/trl/requirements.txt lists its packages

All other settings are TRL's defaults, except float32.
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


class GivenRollouts(GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer with given rollouts, one list for each step."""

    steps: list[list[SyntheticRollout]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, object]:
        rollouts = self.steps[self.state.global_step]
        prompts = [torch.tensor(rollout.prompt) for rollout in rollouts]
        completions = [torch.tensor(rollout.completion) for rollout in rollouts]
        completion_mask = pad([torch.ones_like(ids) for ids in completions], padding_value=0)
        return {
            "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
            "prompt_mask": pad(
                [torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"
            ),
            "completion_ids": pad(completions, padding_value=0),
            "completion_mask": completion_mask,
            "advantages": torch.tensor([rollout.advantage for rollout in rollouts]),
            "num_items_in_batch": completion_mask.sum(),
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
    model, file = arguments
    torch.set_num_threads(1)
    rollouts, clock = read(Path(file)), StepClock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            bf16=False,
            use_cpu=True,
            gradient_accumulation_steps=len(rollouts) // 8,  # all in one step: TRL's micro-batch has 8
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
