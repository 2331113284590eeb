"""Functions that the dialects share: they decode and check requests, and write usage and events."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from gateway.errors import invalid
from gateway.generations.generation import Generation, tokens_of
from gateway.language.chat_messages import Message, text_of
from gateway.language.constraint import AnswerForm, Constraint, choice_form, pattern_form, schema_form
from rollout_queue.foreign_json import read_json

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

JsonObject = dict[str, Any]
"""A JSON object of a client's request, without a struct that describes its fields."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MAX_BIASES = 1024
MAX_STOPS = 32
"""SGLang's limit on the number of stop strings."""
HEARTBEAT = b": still here\n\n"
"""A comment in the format of server-sent events. It keeps the connection open; clients skip it."""

GUIDED = ("guided_json", "guided_regex", "regex", "guided_choice")
encode = msgspec.json.Encoder().encode


class SamplingFields(msgspec.Struct):
    """Sampling parameters of a request: OpenAI's, and those that other servers have added."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None


class GuidedFields(SamplingFields):
    """Sampling parameters, and constraints of the answer: vLLM's `guided_…` fields, and SGLang's `regex`."""

    guided_json: JsonObject | str | None = None
    """A schema, as an object or as text."""
    guided_regex: str | None = None
    regex: str | None = None
    guided_choice: list[str] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = None
    """Accepted without effect: it turns the padding of events on or off, and the gateway pads no events."""


class PromptDetails(msgspec.Struct, frozen=True):
    """What the engine says of the prompt."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """What the tokens of the answers are."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's `usage`, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


# Requests


BOUNDS: dict[str, tuple[float, float]] = {
    "n": (1, 128),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 2),
    "top_logprobs": (0, 20),
    "max_tokens": (1, 2**31),
    "max_completion_tokens": (1, 2**31),
    "max_output_tokens": (1, 2**31),
    "min_tokens": (0, 2**31),
    "routed_experts_prompt_start": (0, 2**31),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "seed": (-(2**63), 2**63 - 129),
}
"""Least and greatest value of each number in a request, in every dialect. The bound of `seed` leaves room for
128 choices, each of which adds its index to the seed."""


ABOVE_ZERO = ("repetition_penalty",)


def check_sampling(body: msgspec.Struct) -> None:
    """Raises InvalidRequest for a number outside its bounds."""
    for name, low, high in _bounded(type(body)):
        value = getattr(body, name)
        if value is None:
            continue
        if value == 0 and name in ABOVE_ZERO:
            raise invalid(name, "not above 0")
        if not low <= value <= high:
            raise invalid(name, f"{value} is not within {low} and {high}")


@cache
def _bounded(kind: type[msgspec.Struct]) -> list[tuple[str, float, float]]:
    """The fields of a request that have bounds."""
    return [(name, *BOUNDS[name]) for name in kind.__struct_fields__ if name in BOUNDS]


def given_fields(body: msgspec.Struct, names: Iterable[str]) -> JsonObject:
    """The fields among `names` that the client set."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def sampling_of(body: SamplingFields, vocab_size: int) -> JsonObject:
    """The sampling parameters that the client set. Raises InvalidRequest for a malformed bias."""
    asked = given_fields(body, SamplingFields.__struct_fields__)
    if biases := asked.pop("logit_bias", None):
        asked["logit_bias"] = biases_of(biases, vocab_size)
    return asked


def biases_of(logit_bias: Mapping[str, float], vocab_size: int) -> dict[str, float]:
    """OpenAI's `logit_bias`, by token id. Raises InvalidRequest for an id outside the vocabulary."""
    if len(logit_bias) > MAX_BIASES:
        raise invalid("logit_bias", f"at most {MAX_BIASES} tokens")
    for token_id, bias in logit_bias.items():
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) < 10):
            raise invalid("logit_bias", f"{token_id[:32]!r} is not a token id")
        if int(token_id) >= vocab_size:
            raise invalid("logit_bias", f"token id {token_id} lies outside the vocabulary of {vocab_size}")
        if not -100 <= bias <= 100:
            raise invalid("logit_bias", f"{bias} is not within -100 and 100")
    return {str(int(token_id)): bias for token_id, bias in logit_bias.items()}


def guided_form(body: GuidedFields) -> tuple[AnswerForm | None, str]:
    """The form that a field of `GuidedFields` asks for, and that field; None if none asks.

    Raises InvalidRequest for two such fields, and for one that cannot be enforced.
    """
    given = [name for name in GUIDED if getattr(body, name) is not None]
    if not given:
        return None, ""
    param = given[0]
    if len(given) > 1:
        raise invalid(given[1], f"{param} is given already")
    if body.guided_choice is not None:
        return choice_form(body.guided_choice, param), param
    if body.guided_json is None:
        return pattern_form(body.guided_regex or body.regex or "", param), param
    schema: Any = body.guided_json
    if isinstance(schema, str):
        try:
            schema = read_json(schema)
        except msgspec.DecodeError as error:
            raise invalid(param, f"not JSON: {error}") from error
    return schema_form(schema, param), param


def split_begun(messages: list[Message], param: str) -> tuple[list[Message], str]:
    """Split off a last message of the assistant, whose text is the beginning of the answer.

    Returns the messages before it, and its text; all messages and "" if the last one is not the assistant's.

    Raises InvalidRequest for a last message that no answer can continue.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return messages, ""
    last = messages[-1]
    text = text_of(last.get("content"))
    if last.get("tool_calls") or last.get("reasoning_content") or last.get("reasoning"):
        raise invalid(param, "an answer continues text, not calls or thoughts")
    if not text.strip() or text != text.rstrip():
        raise invalid(param, "the continued text is empty or ends with a space")
    if len(messages) == 1:
        raise invalid(param, "there is nothing before the text that is continued")
    return messages[:-1], text


def refuse_constrained(constraint: Constraint, param: str) -> None:
    """Raises InvalidRequest for a grammar, because the request gives the beginning of the answer.

    A grammar that only limits calls to one at a time is allowed.
    """
    if constraint.kind not in ("", "parallel_tool_calls"):
        raise invalid(param, f"a grammar ({constraint.kind}) holds for a whole answer, not for its rest")


def left_out(kinds: Sequence[str]) -> JsonObject:
    """The entry in the turn's `sampling.asked` for parts of the request that the model does not get."""
    return {"left_out": list(kinds)} if kinds else {}


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """Stop strings as a list, without empty ones. Raises InvalidRequest for more than MAX_STOPS."""
    given = [stop] if isinstance(stop, str) else stop or []
    if len(given) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} strings")
    return [text for text in given if text]


# Replies


def usage_of(generations: Sequence[Generation], n: int) -> Usage:
    """OpenAI's `usage`: a prompt counts once, for all of its `n` answers."""
    prompt, completion = tokens_of(generations, n)
    cached = sum(each.cached_tokens for each in generations[::n])
    details = CompletionDetails(sum(each.reasoning_tokens for each in generations))
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached), details)


def event(data: bytes, name: bytes | None = None) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name + b"\ndata: " + data + b"\n\n"
