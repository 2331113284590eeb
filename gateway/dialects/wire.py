"""What the dialects share on the wire: bodies, numbers, messages, events."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from gateway.generations.generation import Generation, tokens_of
from gateway.language.constraint import biases_of
from gateway.language.render import Message
from rollout_queue.http.errors import ApiError

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MAX_STOPS = 32
"""SGLang's own bound."""
HEARTBEAT = b": still here\n\n"
"""A comment: it keeps a stream of OpenAI's alive, and says nothing."""


class Wishes(msgspec.Struct):
    """How a caller wishes to be answered, in OpenAI's names and in those that its other servers added."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = False


def decode_body(body: bytes, kind: type[T]) -> T:
    """Raises ApiError 400 that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        param = where.strip("`.") or None
        raise ApiError(400, f"{param}: {message}" if param else message, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


def check_messages(messages: list[Message]) -> None:
    """Raises ApiError 400 for what is no conversation, or holds what a text model cannot read."""
    if not messages:
        raise ApiError(400, "messages: give at least one", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.get("role") not in ROLES:
            raise ApiError(400, f"{where}.role: {message.get('role')!r} is no role", param=f"{where}.role")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                _check_part(part, where)
        elif not (content is None or isinstance(content, str)):
            raise ApiError(400, f"{where}.content: neither text nor a list of parts", param=where)
        calls = message.get("tool_calls")
        if calls is not None and not (
            isinstance(calls, list)
            and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
        ):
            raise ApiError(400, f"{where}.tool_calls: not a list of function calls", param=where)


def _check_part(part: Any, where: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise ApiError(400, f"{where}.content: a part is neither text nor an object", param=where)
    if part.get("type", "text") not in TEXT_PARTS:
        raise ApiError(400, f"{where}.content: this model reads text, not {part.get('type')}", param=where)
    if not isinstance(part.get("text", ""), str):
        raise ApiError(400, f"{where}.content: the text of a part is not text", param=where)


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
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "seed": (-(2**63), 2**63 - 129),
}
"""What a number of a request may be, in every dialect; 128 choices count their seeds on."""


def check_sampling(body: msgspec.Struct) -> None:
    """Raises ApiError 400 for a number outside of its bounds."""
    for name, low, high in _bounded(type(body)):
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise ApiError(400, f"{name}: {value} is not within {low} and {high}", param=name)


@cache
def _bounded(kind: type[msgspec.Struct]) -> list[tuple[str, float, float]]:
    """The numbers among the fields of a request."""
    return [(name, *BOUNDS[name]) for name in kind.__struct_fields__ if name in BOUNDS]


def wished(body: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    """Those of the fields that the caller set."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def sampling_of(body: Wishes, vocab_size: int) -> dict[str, Any]:
    """What a caller of OpenAI's wishes for. Raises ApiError 400 for a bias that is none."""
    asked = wished(body, Wishes.__struct_fields__)
    if biases := asked.pop("logit_bias", None):
        asked["logit_bias"] = biases_of(biases, vocab_size)
    return asked


def usage_of(generations: Sequence[Generation], n: int) -> dict[str, int]:
    """OpenAI's `usage`: a prompt counts once, for all of its `n` answers."""
    prompt, completion = tokens_of(generations, n)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def stops(stop: str | list[str] | None) -> list[str]:
    """Stop strings as a list, without empty ones. Raises ApiError 400 for more than an engine takes."""
    given = [stop] if isinstance(stop, str) else stop or []
    if len(given) > MAX_STOPS:
        raise ApiError(400, f"stop: at most {MAX_STOPS} strings", param="stop")
    return [text for text in given if text]


def event(data: bytes, name: bytes | None = None) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name + b"\ndata: " + data + b"\n\n"
