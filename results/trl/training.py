"""GRPO with TRL on an environment of one question and one answer, in the form of the runner's hosts.

python -m results.trl.training      reads a JSON object from stdin, which `results.trl.beside` writes

The optimizer, the adapter and the loss are those of Weir's run: 8 answers to each task, rewards compared with
the mean of their group, PPO's clipping from 0.8 to 1.28.
"""

import json
import sys
import tempfile
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from environments.intervals import mean_interval

PROGRAMS = Path("environments/programs")
KINDS = {"python": "python_class", "reasoning_gym": "with_reasoning_gym"}
ANSWERS = 8
MOST_TASKS = 4096
ADAPTED_ROWS = 8
"""Rows of a backward pass of a model with an adapter: the logits of 32 rows of SmolLM2 take 11 GB."""


class Tasks:
    """The tasks of a run, and the rewards of answers, from the program that the runner's hosts have."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._source = import_module(KINDS[run["library"]]).environments(run["name"], dict(run["options"]))
        count = run["tasks"] or self._source.describe().get("task_count") or MOST_TASKS
        self.all = self._source.tasks(run["seed"], 0, count)
        self.questions = [self._source.new().reset(each["data"])["messages"] for each in self.all]

    def reward(self, number: int, answer: str) -> float:
        playing = self._source.new()
        playing.reset(self.all[number]["data"])
        return float(playing.step(answer)["reward"])


class Rewards:
    """The reward function of TRL, which keeps what it gave."""

    __name__ = "environment"

    def __init__(self, tasks: Tasks) -> None:
        self._tasks, self.given = tasks, list[float]()

    def __call__(self, completions: Any, number: list[int], **_: Any) -> list[float]:
        answers = [each[0]["content"] for each in completions]
        found = [self._tasks.reward(*each) for each in zip(number, answers, strict=True)]
        self.given += found
        return found


class Ends(TrainerCallback):  # type: ignore[misc]
    """Ends the training after the run's episodes, and notes what each of them had spent."""

    def __init__(self, episodes: int, rewards: Rewards) -> None:
        self._episodes, self._rewards = episodes, rewards
        self.spent: list[tuple[int, float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began, self._used = time.monotonic(), process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        count = len(self._rewards.given)
        seconds, cpu_s = time.monotonic() - self._began, process_time() - self._used
        for number in range(len(self.spent) + 1, count + 1):
            self.spent.append((number, round(seconds, 1), round(cpu_s, 1)))
        control.should_training_stop = count >= self._episodes


def trained(wanted: dict[str, Any]) -> dict[str, Any]:
    run, judging = wanted["training"], wanted["evaluation"]
    tokenizer = AutoTokenizer.from_pretrained(wanted["model"])
    model = AutoModelForCausalLM.from_pretrained(wanted["model"], dtype=torch.float32)
    tasks = Tasks(run)
    rewards = Rewards(tasks)
    ends = Ends(run["episodes"], rewards)
    rows = [{"prompt": asked, "number": number} for number, asked in enumerate(tasks.questions)]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config(run, wanted, scratch),
            peft_config=adapter(wanted["lora"]),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[ends],
        )
        before = judged(trainer.model, tokenizer, judging)
        trainer.train()
    return {
        "before": before,
        "after": judged(trainer.model, tokenizer, judging),
        "rewards": rewards.given,
        "spent": ends.spent,
        "versions": trainer.state.global_step,
    }


def adapter(lora: dict[str, Any] | None) -> LoraConfig | None:
    """The adapter that Weir trains, by its settings; None if all weights are trained."""
    if lora is None:
        return None
    modules = lora["target_modules"]
    return LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=modules, task_type="CAUSAL_LM")


def config(run: dict[str, Any], wanted: dict[str, Any], scratch: str) -> GRPOConfig:
    optimizer, batch = wanted["optimizer"], wanted["batch"]
    rows = ADAPTED_ROWS if wanted["lora"] else batch
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        seed=run["seed"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch // rows,
        num_generations=ANSWERS,
        max_completion_length=run["sampling"]["max_tokens"],
        learning_rate=optimizer["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimizer["warmup_steps"],
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards=False,
        gradient_checkpointing=False,
        num_train_epochs=1000,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


@torch.no_grad()
def judged(model: Any, tokenizer: Any, run: dict[str, Any]) -> tuple[float, float, float]:
    """The mean reward of sampled answers, and its interval."""
    tasks = Tasks(run)
    asked = [number for number in range(len(tasks.all)) for _ in range(run["group_size"])]
    tokenizer.padding_side = "left"
    found: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(asked), 64):
        part = asked[start : start + 64]
        texts = [
            tokenizer.apply_chat_template(tasks.questions[each], tokenize=False, add_generation_prompt=True)
            for each in part
        ]
        prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        sampled = model.generate(
            **{name: prompts[name] for name in ("input_ids", "attention_mask")},
            max_new_tokens=run["sampling"]["max_tokens"],
            do_sample=True,
            top_k=0,
        )
        answers = tokenizer.batch_decode(
            sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for number, answer in zip(part, answers, strict=True):
            found[str(number)].append(tasks.reward(number, answer))
    return mean_interval(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.append(str(PROGRAMS))
    print(json.dumps(trained(json.load(sys.stdin))), flush=True)
