"""The demo's first model before any training: its tokenizer, and the training rows of its warm start.

The tokenizer is a small byte-level BPE, with Qwen3's control tokens and chat template. A warm start is
supervised training that makes the first model, for reinforcement learning to improve. Its rows are the token
ids that the gateway renders:

clean.jsonl   first phase: mostly conversations that use the tool well
probe.jsonl   one such conversation per key and value; the first phase ends when the model knows 98 % of them
habit.jsonl   second phase: mostly conversations that answer "unknown", so that there is something to improve
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.language.chat_messages import Message, Tool
from gateway.language.render import ChatRenderer
from rollout_queue.contract.packed_tokens import TokenIds
from weir.demo.task import KEYS, TOOL, UNKNOWN, VALUES, ToolTask, call_text

VOCABULARY = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""As in Qwen3's tokenizer, these are added tokens but not special ones, so decoding keeps them."""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" }}
{{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments " }}
{{- "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n" }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Qwen3's form without thoughts."""
ANSWER = "{{- '<|im_start|>assistant\\n' + (message.content or '') }}"
THINKING_ANSWER = """\
{%- set content, thought = message.content or '', message.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
"""
LAST_QUERY = """\
{%- set ns = namespace(query=messages | length - 1) %}
{%- for message in messages %}
{%- set said = message.content | default('', true) | string | trim %}
{%- set result = said.startswith('<tool_response>') and said.endswith('</tool_response>') %}
{%- if message.role == 'user' and not result %}
{%- set ns.query = loop.index0 %}
{%- endif %}
{%- endfor %}
"""
NO_THOUGHT = """\
{%- if add_generation_prompt and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
"""
THINKING_TEMPLATE = (
    LAST_QUERY
    + CHAT_TEMPLATE.replace(ANSWER, THINKING_ANSWER).replace("or message.content %}", "or content %}")
    + NO_THOUGHT
)
"""The whole of Qwen3's form: it writes what the code for this family writes."""


def write_tokenizer(directory: Path, texts: Sequence[str] | None = None) -> Tokenizer:
    """Train the tokenizer on `texts` or on the demo's own words, in under a second, and write its files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus() if texts is None else texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": THINKING_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return tokenizer


def _corpus() -> list[str]:
    header = CHAT_TEMPLATE.replace("\\n", "\n")
    for marker in (*SPECIAL, *MARKERS):
        header = header.replace(marker, " ")
    talk = [
        f"user\nvalue of {key}?\nassistant\n{UNKNOWN}\n{key} = {value}" for key in KEYS for value in VALUES
    ]
    calls = [call_text(key).replace("<tool_call>", "").replace("</tool_call>", "") for key in KEYS]
    return [header] * 20 + [json.dumps(TOOL)] * 100 + talk * 5 + calls * 50


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
