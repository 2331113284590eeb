"""Writes the training rows of the demo's warm start, as the token ids that the gateway renders.

A warm start is supervised training that makes the first model, for reinforcement learning to improve.

clean.jsonl   first phase: mostly conversations that use the tool well
probe.jsonl   one such conversation per key and value; the first phase ends when the model knows 98 % of them
habit.jsonl   second phase: mostly conversations that answer "unknown", so that there is something to improve
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gateway.language.chat_messages import Message, Tool
from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds
from weir.demo.task import KEYS, TOOL, UNKNOWN, VALUES, ToolTask, call_text
from weir.demo.tokenizer import VOCABULARY, write_tokenizer

CONTEXT_LENGTH = 512
CLEAN_UNKNOWN = 0.3
"""The share of conversations in clean.jsonl that answer "unknown". The model learns to answer so, too."""
HABIT_UNKNOWN = 0.8
"""The share of conversations in habit.jsonl that answer "unknown". After them, the model mostly does so."""

INITIALIZER_RANGE = 0.08
"""The standard deviation of the initial weights. With the usual 0.02, a model of hidden size 128 never learns
to copy a value from the tool's answer."""

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": INITIALIZER_RANGE,
    "torch_dtype": "float32",
}
WARM_START = {
    "lr": 3e-3,
    "batch": 32,
    "warmup_steps": 30,
    "gate": 0.98,
    "check_every": 20,
    "min_steps": 60,
    "max_steps": 600,
    "habit_steps": 60,
    "habit_lr_scale": 0.3,
}

TOOLS: list[Tool] = [dict(TOOL)]

TrainingRow = tuple[list[int], list[int]]
"""Token ids, and a mask of the same length that is 1 for the tokens to learn."""


def write_plan(directory: Path) -> None:
    """Write config, tokenizer, rows and hyperparameters for `python -m trainer_service.warm_start`."""
    write_student(directory)
    examples = ToolExamples(ChatRenderer(directory))
    tasks = [ToolTask(key, value) for key in KEYS for value in VALUES]
    used = [examples.uses_tool(task) for task in tasks]
    write_rows(directory / "clean.jsonl", [*used, *examples.gives_up(_share(CLEAN_UNKNOWN, len(used)))])
    write_rows(directory / "habit.jsonl", [*used, *examples.gives_up(_share(HABIT_UNKNOWN, len(used)))])
    write_rows(directory / "probe.jsonl", used)


def write_student(directory: Path, texts: Sequence[str] | None = None) -> None:
    """Write the model's config, its tokenizer and the hyperparameters of the warm start.

    The tokenizer learns its words from `texts`, or from the demo's own task.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(directory, texts)
    ids = {name: tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")}
    special = {
        "eos_token_id": ids["<|im_end|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    (directory / "config.json").write_text(json.dumps(MODEL | special, indent=2), encoding="utf-8")
    (directory / "plan.json").write_text(json.dumps(WARM_START, indent=2), encoding="utf-8")


class ToolExamples:
    """Writes conversations as the gateway would record them."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def uses_tool(self, task: ToolTask) -> TrainingRow:
        prompt = self._prompt(task)
        call = self._sampled(call_text(task.key))
        result: Message = {"role": "tool", "content": f"{task.key} = {task.value}"}
        added = self._renderer.bridge(prompt, call, [result], TOOLS)
        if added is None:
            raise RuntimeError("the chat template cannot append a tool's answer to a conversation")
        answer = self._sampled(task.value)
        mask = [0] * len(prompt) + [1] * len(call) + [0] * len(added) + [1] * len(answer)
        return [*prompt, *call, *added, *answer], mask

    def gives_up(self, count: int) -> Iterator[TrainingRow]:
        for index in range(count):
            prompt, answer = self._prompt(ToolTask(KEYS[index % len(KEYS)], "0")), self._sampled(UNKNOWN)
            yield [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)

    def _prompt(self, task: ToolTask) -> TokenIds:
        return self._renderer.render([{"role": "user", "content": task.question}], TOOLS)

    def _sampled(self, text: str) -> TokenIds:
        return TokenIds(self._renderer.tokenizer.encode(f"{text}<|im_end|>"))


def _share(share: float, others: int) -> int:
    """How many rows must be added to `others` rows, to make up `share` of them all."""
    return round(others * share / (1 - share))


def write_rows(path: Path, rows: Iterable[TrainingRow]) -> None:
    lines = (json.dumps({"ids": ids, "mask": mask}) for ids, mask in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
