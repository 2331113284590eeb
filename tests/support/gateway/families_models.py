"""Small stand-ins for models of many families: each family adds its control tokens to one byte-level BPE.

A directory holds the files of a model that the gateway reads, config.json and tokenizer.json, and no weights.
"""

import json
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MERGES = 200
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
TOOL_RESPONSE = ("<tool_response>", "</tool_response>")
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN = (*CHATML, *TOOL_CALL, *TOOL_RESPONSE, *THINK)
QWEN_VISION = (*QWEN, *VISION)
GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    *(*THINK, *TOOL_CALL, *TOOL_RESPONSE, *ARGUMENTS),
)
KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|endoftext|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")  # noqa: RUF001
DEEPSEEK_TOOLS = tuple(
    f"<｜tool▁{name}｜>"  # noqa: RUF001
    for name in (
        *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"),
        *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"),
    )
)
DEEPSEEK_TASKS = tuple(
    f"<｜{name}｜>"  # noqa: RUF001
    for name in ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
)
HY3_MARKS = ("hy_begin_of_sentence", "hy_eos", "hy_User", "hy_Assistant", "reasoning_mode")
HY3_TAGS = ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
HY3 = (
    *(f"<｜{name}:opensource｜>" for name in HY3_MARKS),  # noqa: RUF001
    *(f"<{slash}{name}:opensource>" for name in HY3_TAGS for slash in ("", "/")),
    "<tool_sep:opensource>",
)
GEMMA = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *("<|image>", "<|image|>", "<image|>", '<|"|>'),
)
INKLING = (
    *("<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>"),
    *("<|content_text|>", "<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>"),
    *("<|content_xml|>", "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
    *("<|content_model_end_sampling|>", "<|end_message|>", "<|audio_end|>", "<|endoftext|>"),
    *("<|unused_200054|>", "<|unused_200053|>"),
)
LAGUNA = ("〈|EOS|〉", *THINK, "<assistant>", "</assistant>", *TOOL_CALL)
MINIMAX = ("]~!b[", "]~b]", "[e~[", *THINK, "<minimax:tool_call>", "</minimax:tool_call>")
LLAMA = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|python_tag|>"),
)

CONTROL_TOKENS: dict[str, tuple[str, ...]] = {
    "qwen3": QWEN,
    "prime-qwen3": QWEN,
    "qwen3-vl": QWEN_VISION,
    "qwen3.5": QWEN_VISION,
    "qwen3.6": QWEN_VISION,
    "qwen3.8": QWEN_VISION,
    "glm-4.5": GLM,
    "glm-5": GLM,
    "glm-5.1": GLM,
    "glm-5.3": GLM,
    "kimi-k2": KIMI,
    "kimi-k2.5": (*KIMI, "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", *THINK),
    "minimax-m2": MINIMAX,
    "deepseek-v3": (*DEEPSEEK, *DEEPSEEK_TOOLS),
    "deepseek-r1": (*DEEPSEEK, *DEEPSEEK_TOOLS, *THINK),
    "deepseek-v4": (*DEEPSEEK, *DEEPSEEK_TASKS, *THINK, "｜DSML｜"),  # noqa: RUF001
    "nemotron-3": QWEN,
    "nemotron-3-ultra": QWEN,
    "nemotron-3.5": (*QWEN, "<image>"),
    "llama-3": LLAMA,
    "gemma4": GEMMA,
    "hy3": HY3,
    "inkling": INKLING,
    "laguna-xs.2": LAGUNA,
    "laguna-m.1": LAGUNA,
    "laguna-xs-2.1": LAGUNA,
    "laguna-s-2.1": LAGUNA,
}
"""The keys are names in `renderers`. gpt-oss is missing, because its library downloads a vocabulary."""

ENDS = (
    *("<|im_end|>", "<|content_model_end_sampling|>", "<|endoftext|>", "<|eot_id|>", "<eos>", "[e~["),
    *("<｜end▁of▁sentence｜>", "<｜hy_eos:opensource｜>", "〈|EOS|〉"),  # noqa: RUF001
)
"""The first of these that a family has is the `eos_token_id` of its config.json."""
FRAME = frozenset(token for token in chain(*CONTROL_TOKENS.values()) if "|" in token and "tool" not in token)
"""Tokens that are special in the real tokenizers. The marks of thoughts and calls, which are part of answers,
are not special."""


def make_model(directory: Path, family: str, *, ordinary: tuple[str, ...] = ()) -> Path:
    """Write config.json and tokenizer.json of a model of `family`. Each `ordinary` text is a token, too."""
    control = CONTROL_TOKENS[family]
    added = [AddedToken(token, special=token in FRAME) for token in control]
    end = next(end for end in ENDS if end in control)
    return write_model(directory, added + [AddedToken(text, special=False) for text in ordinary], end)


def write_model(directory: Path, added: list[AddedToken], end: str) -> Path:
    """Write config.json and tokenizer.json of a model with these tokens, whose answers end with `end`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_ordinary())
    tokenizer.add_tokens(added)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "model_type": "stand-in",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 32768,
        "eos_token_id": tokenizer.token_to_id(end),
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@cache
def _ordinary() -> str:
    """The tokenizer of ordinary text that all families share: every byte, and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_text(), trainer)
    return str(tokenizer.to_str())


def _text() -> Iterable[str]:
    yield from Path(json.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
