"""Decodes the body of a request, and bounds what that costs.

body ──count──▶ few enough values ──msgspec──▶ a struct; unknown fields are noted or refused

OTHERS are the fields that other servers or other paths take, and that would change the prompt or the answer.
The table holds at every path, for fields which that path does not read, and for other spellings of their
names, such as `topP`. A value that asks for nothing is accepted; any other is a 400, because the answer would
not be the one that was asked for.
"""

import re
from collections.abc import Container
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Raw

from gateway.dialects.fields import Refusals, check_unread
from gateway.errors import InvalidRequest, invalid
from rollout_queue.foreign_json import MOST_VALUES, TooManyValues, check_values, read_json

ONLY_TOKENS = "this path does not serve it; /inference/v1/generate does"
NO_SAMPLER = "this gateway does not sample so"
NO_LIMIT_HERE = "this path does not limit answers by it; use max_tokens (max_output_tokens in Responses)"
GUIDED = "use guided_json, guided_regex or guided_choice, in Chat and Completions"
EFFORT = "use reasoning_effort or chat_template_kwargs in Chat, reasoning in Responses, thinking in Messages"
TEMPLATE = "the deployment chooses the chat template"
NOT_HERE = "this path does not serve it"
TEXT_ONLY = "this path reads text only"
CANDIDATES = "this path returns one answer, that of the policy"
BESIDE = "put its fields beside the messages"
USE_STOP = "use stop (stop_sequences in Messages)"
SYSTEM = "put it into a system message"
NO_BANS = "this gateway forbids no words; use logit_bias"
NO_SEARCH = "this gateway does not search"
NO_CUT = "this gateway shortens no prompts"

WORD_BEGINS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_SAMPLING: Refusals = {
    "temperature": ((), NOT_HERE),
    "top_p": ((1,), NOT_HERE),
    "top_k": ((-1, 0), NOT_HERE),
    "min_p": ((0,), NOT_HERE),
    "repetition_penalty": ((1,), NOT_HERE),
    "frequency_penalty": ((0,), NOT_HERE),
    "presence_penalty": ((0,), NOT_HERE),
    "logit_bias": (({},), NOT_HERE),
    "seed": ((), NOT_HERE),
    "random_seed": ((), "use seed"),
    "sampling_seed": ((), "use seed"),
    "repeat_penalty": ((1,), "use repetition_penalty"),
    "length_penalty": ((1,), NO_SAMPLER),
    "use_beam_search": ((False,), NO_SAMPLER),
    "beam_width": ((1,), NO_SAMPLER),
    "num_beams": ((1,), NO_SAMPLER),
    "early_stopping": ((False,), NO_SAMPLER),
    "do_sample": ((True,), "use temperature: 0"),
    "top_a": ((0,), NO_SAMPLER),
    "typical_p": ((1,), NO_SAMPLER),
    "tfs_z": ((1,), NO_SAMPLER),
    "typical": ((1,), NO_SAMPLER),
    "tfs": ((1,), NO_SAMPLER),
    "top_n_sigma": ((0, -1), NO_SAMPLER),
    "nsigma": ((0,), NO_SAMPLER),
    "skew": ((0,), NO_SAMPLER),
    "guidance_scale": ((1,), NO_SAMPLER),
    "cfg_scale": ((1,), NO_SAMPLER),
    "negative_prompt": (("",), NO_SAMPLER),
    "penalty_alpha": ((0,), NO_SAMPLER),
    "encoder_repetition_penalty": ((1,), NO_SAMPLER),
    "diversity_penalty": ((0,), NO_SAMPLER),
    "num_beam_groups": ((1,), NO_SAMPLER),
    "dynamic_temperature": ((False,), NO_SAMPLER),
    "temperature_last": ((False,), NO_SAMPLER),
    "sampler_priority": (([],), NO_SAMPLER),
    "sampler_order": (([],), NO_SAMPLER),
    "watermark": ((False,), NO_SAMPLER),
    "repetition_detection": (({},), NO_SAMPLER),
    "eta_cutoff": ((0,), NO_SAMPLER),
    "epsilon_cutoff": ((0,), NO_SAMPLER),
    "mirostat": ((0,), NO_SAMPLER),
    "mirostat_mode": ((0,), NO_SAMPLER),
    "dynatemp_range": ((0,), NO_SAMPLER),
    "smoothing_factor": ((0,), NO_SAMPLER),
    "dry_multiplier": ((0,), NO_SAMPLER),
    "xtc_probability": ((0,), NO_SAMPLER),
    "no_repeat_ngram_size": ((0,), NO_SAMPLER),
    "samplers": (([],), NO_SAMPLER),
    "logits_processors": (([],), NO_SAMPLER),
    "custom_logit_processor": ((), NO_SAMPLER),
    "custom_params": (({},), NO_SAMPLER),
    "sampling_params": (({},), NOT_HERE),
    **dict.fromkeys(("options", "parameters", "generation_config", "extra_body"), (({},), BESIDE)),
    "bad_words": (([],), NO_BANS),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "suppress_tokens"), (([],), NO_BANS)),
    **dict.fromkeys(("begin_suppress_tokens", "banned_tokens", "banned_strings"), (([], ""), NO_BANS)),
    "custom_token_bans": (([], ""), NO_BANS),
    "ban_eos_token": ((False,), ONLY_TOKENS),
    "allowed_token_ids": ((), "this gateway does not limit the vocabulary; use logit_bias"),
    "extra_args": (({},), "this gateway hands nothing to the engine unread"),
    "vllm_xargs": (({},), "this gateway hands nothing to the engine unread"),
    "lora_path": ((), "use the name of the model"),
}
_LENGTH: Refusals = {
    "max_tokens": ((), NO_LIMIT_HERE),
    "max_completion_tokens": ((), NO_LIMIT_HERE),
    "max_output_tokens": ((), NO_LIMIT_HERE),
    "max_new_tokens": ((), NO_LIMIT_HERE),
    "max_length": ((), NO_LIMIT_HERE),
    "max_tokens_to_sample": ((), NO_LIMIT_HERE),
    "n_predict": ((-1,), NO_LIMIT_HERE),
    "num_predict": ((-1,), NO_LIMIT_HERE),
    "max_time": ((), NO_LIMIT_HERE),
    "min_length": ((0,), ONLY_TOKENS),
    "min_tokens": ((0,), ONLY_TOKENS),
    "min_new_tokens": ((0,), ONLY_TOKENS),
    "ignore_eos": ((False,), ONLY_TOKENS),
    "stop": (([], ""), "this path does not serve it; Messages calls it stop_sequences"),
    "stop_sequences": (([],), "use stop"),
    **dict.fromkeys(("stop_strings", "stop_words", "stopping_strings"), (([], ""), USE_STOP)),
    "stop_token_ids": (([],), ONLY_TOKENS),
    "stop_regex": (([], ""), "use stop"),
    "n": ((1,), CANDIDATES),
    "best_of": ((1,), CANDIDATES),
    "num_return_sequences": ((1,), CANDIDATES),
}
_GRAMMAR: Refusals = {
    **dict.fromkeys(("guided_json", "guided_regex", "regex", "guided_choice"), ((), NOT_HERE)),
    **dict.fromkeys(("ebnf", "guided_grammar", "grammar", "structural_tag"), (("",), GUIDED)),
    "json_schema": (({}, ""), "use guided_json"),
    "structured_outputs": (({},), GUIDED),
    "guided_decoding": (({},), GUIDED),
    "guided_whitespace_pattern": ((), GUIDED),
    "response_format": (({"type": "text"},), "this path does not serve it; use text.format in Responses"),
    "format": (("",), "use response_format"),
    "response_schema": (({},), "use response_format"),
    "response_mime_type": (("", "text/plain"), "use response_format"),
}
_PROMPT: Refusals = {
    "prompt": ((), "this path reads messages (input in Responses, token_ids in /inference/v1/generate)"),
    "messages": ((), "this path does not read messages"),
    "contents": ((), "use messages"),
    "input": ((), "use messages"),
    "input_ids": ((), "use /inference/v1/generate, which calls it token_ids"),
    **dict.fromkeys(("system", "instructions", "system_instruction", "system_prompt"), ((), SYSTEM)),
    "tools": (([],), NOT_HERE),
    "functions": (([],), NOT_HERE),
    "tool_choice": (("auto", "none"), NOT_HERE),
    "function_call": (("auto", "none"), NOT_HERE),
    "parallel_tool_calls": ((True,), NOT_HERE),
    "add_special_tokens": ((False,), "the chat template writes them"),
    "add_generation_prompt": ((True,), NOT_HERE),
    "continue_final_message": ((False,), NOT_HERE),
    "chat_template": ((), TEMPLATE),
    "chat_template_kwargs": (({},), NOT_HERE),
    "documents": (([],), "put them into a message"),
    "suffix": (("",), NOT_HERE),
    "template": ((), TEMPLATE),
    "safe_prompt": ((False,), "this gateway adds nothing to a prompt"),
    "prompt_mode": ((), TEMPLATE),
    "transforms": (([],), NO_CUT),
    "truncate_prompt_tokens": ((-1,), NO_CUT),
    "prompt_truncate_len": ((), NO_CUT),
    "context_length_exceeded_behavior": (("error",), NO_CUT),
    "plugins": (([],), "this gateway runs none"),
    "web_search_options": ((), NO_SEARCH),
    "enable_search": ((False,), NO_SEARCH),
    "search_parameters": (({}, {"mode": "off"}), NO_SEARCH),
    "features": (({},), TEXT_ONLY),
    "content_parts": (([],), TEXT_ONLY),
    "prompt_embeds": (([],), TEXT_ONLY),
    "input_embeds": (([],), TEXT_ONLY),
    "mm_processor_kwargs": (({},), "this gateway reads images in one way"),
    "image_data": (([],), "put images into the content of a message"),
    "images": (([],), "put images into the content of a message"),
    "session_params": (({},), "use x-session-id"),
}
_THOUGHTS: Refusals = {
    **dict.fromkeys(("enable_thinking", "think", "thinking"), ((), EFFORT)),
    **dict.fromkeys(("thinking_budget", "thinking_token_budget", "thinking_config"), ((), EFFORT)),
    "reasoning_effort": ((), EFFORT),
    "reasoning": (({},), EFFORT),
    "output_config": (({},), EFFORT),
    "separate_reasoning": ((True,), "thoughts are always apart from the answer"),
    "stream_reasoning": ((True,), "thoughts are streamed as they come"),
    "include_reasoning": ((True,), "thoughts are always shown"),
    "reasoning_format": (("parsed",), "thoughts are always apart from the answer"),
    **dict.fromkeys(("reasoning_budget", "max_thinking_tokens"), ((), EFFORT)),
}
_ANSWER: Refusals = {
    "stream": ((False,), "this path answers with one body"),
    "echo": ((False,), NOT_HERE),
    "logprobs": ((False,), NOT_HERE),
    "top_logprobs": ((0,), NOT_HERE),
    "prompt_logprobs": ((), "only sampled tokens have logprobs here"),
    "input_logprobs": ((False,), "only sampled tokens have logprobs here"),
    "skip_special_tokens": ((True,), "the text of an answer has none"),
    "spaces_between_special_tokens": ((True, False), "the text of an answer has no special tokens"),
    "include_stop_str_in_output": ((False,), "the text of an answer ends before the stop string"),
    "no_stop_trim": ((False,), "the text of an answer ends before the stop string"),
    "detokenize": ((True,), NOT_HERE),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "return_hidden_states": ((False,), "this gateway returns no hidden states"),
    "return_routed_experts": ((False,), ONLY_TOKENS),
    "continuous_usage_stats": ((False,), "only the last chunk has usage"),
    "priority": ((0,), "this gateway serves calls in the order in which they come"),
    "kv_transfer_params": (({},), "this gateway moves no caches"),
}
OTHERS: Refusals = {**_SAMPLING, **_LENGTH, **_GRAMMAR, **_PROMPT, **_THOUGHTS, **_ANSWER}


def check_other(name: str, value: Any, path: str, served: Container[str]) -> None:
    """Note a field of a request that its path does not read, and refuse it if it is one of `OTHERS` in any
    spelling. `served` are the fields that the path reads."""
    plain = WORD_BEGINS.sub("_", name.strip()).replace("-", "_").lower()
    if plain not in OTHERS:
        plain = name
    elif plain in served and value is not None and value not in OTHERS[plain][0]:
        raise invalid(path, f"write it {plain}")
    check_unread(plain, value, OTHERS, path)


T = TypeVar("T", bound=msgspec.Struct)

LISTS, MOST_ITEMS = ("messages", "input", "tools"), 10_000
"""What the gateway goes through item by item, and how many items it takes."""
UNKNOWN_FIELD = re.compile("Object contains unknown field `")
encode = msgspec.json.Encoder().encode


def decode_body(body: bytes, kind: type[T], context_length: int = 0) -> T:
    """The body as the struct `kind`. Raises InvalidRequest that names a wrong field, or an unread one whose
    value asks for something (`OTHERS`); also for a body with more values than a context holds."""
    try:
        check_values(body, max(MOST_VALUES, context_length))
        decoded = _decode(body, kind)
        if len(body) > MOST_ITEMS:
            _check_lists(decoded)
        return decoded
    except TooManyValues as error:
        raise InvalidRequest(f"the body has {error}", code="too_many_values") from error
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        param = where.strip("`.") or None
        raise InvalidRequest(f"{param}: {message}" if param else message, param=param) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _check_lists(decoded: msgspec.Struct) -> None:
    for name in LISTS:
        if len(value := getattr(decoded, name, None) or ()) > MOST_ITEMS and isinstance(value, list):
            raise invalid(name, f"more than {MOST_ITEMS}")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return read_json(body, kind)
    except msgspec.ValidationError as error:
        if UNKNOWN_FIELD.match(str(error)) is None:
            raise
    return read_json(_read_part(body, kind), kind)


def _read_part(body: bytes | Raw, kind: type[msgspec.Struct], where: str = "") -> bytes:
    """The body without the fields that the struct `kind` does not have. These are noted, or refused."""
    inner = _structs_in(kind)
    kept: dict[str, Raw] = {}
    for name, value in read_json(bytes(body), dict[str, Raw]).items():
        if name not in kind.__struct_fields__:
            check_other(name, read_json(bytes(value)), where + name, kind.__struct_fields__)
        elif name in inner and bytes(value).startswith(b"{"):
            kept[name] = Raw(_read_part(value, inner[name], f"{where}{name}."))
        else:
            kept[name] = value
    return encode(kept)


@cache
def _structs_in(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields of a struct that are structs themselves."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        for each in (hint, *get_args(hint)):
            if isinstance(each, type) and issubclass(each, msgspec.Struct):
                found[name] = each
    return found
