"""The demo model's tokenizer: a small byte-level BPE, with Qwen3's control tokens and chat template."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from weir.demo.task import KEYS, TOOL, UNKNOWN, VALUES, call_text

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
