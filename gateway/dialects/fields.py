"""Refuses fields that the gateway cannot serve, in requests and in the objects inside them, by name.

A field is accepted if the gateway serves it, or if it changes no token (`prompt_cache_key`). Another field is
accepted only with a value that asks for nothing.
`decode_body` refuses unknown fields of a request. `check_fields` refuses unknown fields of messages, parts of
their content, items, tool calls and tools.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.errors import InvalidRequest

MAX_METADATA_BYTES = 16 * 2**10
"""Limit on the JSON of `metadata`."""

Refusals = Mapping[str, tuple[Sequence[Any], str]]
"""By field: the values that are accepted because they ask for nothing, as null does; why others are not."""

CHAT: Refusals = {
    "audio": ((), "this model writes text only"),
    "modalities": ((["text"],), "this model writes text only"),
    "web_search_options": ((), "this gateway does not search"),
    "moderation": ((), "this gateway does not moderate"),
}
RESPONSES: Refusals = {
    "background_options": ((), "this gateway does not serve it"),
    "conversation": ((), "this gateway does not serve it; use previous_response_id"),
    "prompt": ((), "this gateway does not serve it"),
    "context_management": (([],), "this gateway changes no history"),
    "truncation": (("disabled", "auto"), "auto or disabled; what does not fit is a 400 in either case"),
    "moderation": ((), "this gateway does not moderate"),
    "image": ((), "this model writes text only"),
    "access_programs": (([], {}), "this gateway does not serve it"),
}
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""The edit of a history with which Claude Code asks that all thoughts are kept."""
MESSAGES: Refusals = {
    "container": ((), "this gateway runs no code"),
    "mcp_servers": (([],), "this gateway calls no servers"),
    "context_management": (({}, {"edits": []}, {"edits": [KEEP_ALL]}), "this gateway changes no history"),
    "compaction": ((), "this gateway changes no history"),
    "fallbacks": (([],), "there is one policy, and no other model to fall back to"),
    "speed": (("standard",), "this gateway has one speed"),
}


VERBOSITIES = ("low", "medium", "high")


def verbosity_of(value: Any, param: str) -> Mapping[str, str]:
    """The verbosity that a call asks for, as its turn records it. The model has one level, which serves all
    three: SDKs send one by default. Raises InvalidRequest for any other value."""
    if value is None:
        return {}
    if value not in VERBOSITIES:
        raise InvalidRequest(f"{param}: one of {', '.join(VERBOSITIES)}", param=param)
    return {"verbosity": value}


def refuse_unserved(body: msgspec.Struct, refusals: Refusals) -> None:
    """Raises InvalidRequest that names the first field whose value the gateway cannot serve."""
    for name, (neutral, reason) in refusals.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{name}: {reason}", param=name)


def check_keys(given: Mapping[str, Any] | None, known: Sequence[str], where: str) -> None:
    """Raises InvalidRequest that names a field of the object `where` which the gateway does not know."""
    for name, value in (given or {}).items():
        if name not in known and value is not None:
            raise InvalidRequest(f"{where}.{name}: unknown field", param=f"{where}.{name}")


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raises InvalidRequest for `metadata` over the limit."""
    if metadata and len(msgspec.json.encode(metadata)) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"metadata: more than {MAX_METADATA_BYTES} bytes of JSON", param="metadata")


# Objects inside requests


class Fields(msgspec.Struct, frozen=True):
    """The fields of one kind of object."""

    accepted: frozenset[str]
    """Names of the fields that the gateway reads, or that change no token."""
    refused: Refusals = {}
    """Other fields that clients send: the values that ask for nothing, and why any other value is refused."""


def check_fields(given: Mapping[str, Any], fields: Fields, where: str) -> None:
    """Raises InvalidRequest that names the first field of the object `where` that is not served."""
    if given.keys() <= fields.accepted:
        return
    for name, value in given.items():
        if name in fields.accepted or value is None:
            continue
        neutral, reason = fields.refused.get(name, ((), "unknown field"))
        if value not in neutral:
            path = f"{where}.{name}"
            raise InvalidRequest(f"{path}: {reason}", param=path)


def check_format(form: Any, where: str) -> None:
    """Raises InvalidRequest that names an unknown field of a format such as `response_format`."""
    if isinstance(form, dict):
        check_fields(form, FORMAT, where)
        check_format(form.get("json_schema"), f"{where}.json_schema")


def check_choice(choice: Any) -> None:
    """Raises InvalidRequest that names an unknown field of `tool_choice`."""
    if isinstance(choice, Mapping):
        check_fields(choice, CHOICE, "tool_choice")
        if isinstance(function := choice.get("function"), dict):
            check_fields(function, NAMED, "tool_choice.function")


def _fields(names: str, refused: Refusals | None = None) -> Fields:
    return Fields(frozenset(names.split()), refused or {})


MARKS = "cache_control prompt_cache_breakpoint"
"""Fields that mark where a prompt may be cached. They have no effect: the engine caches prompts by itself."""
NO_SOUND = ((), "this model writes text only")
NO_NAMESPACE = ((), "this gateway knows no groups of tools")
DIRECT: Refusals = {
    "async": ((False,), "the agent waits for every call"),
    "caller": (({"type": "direct"},), "only the model calls tools"),
    "namespace": NO_NAMESPACE,
    "toolset_name": NO_NAMESPACE,
}
ELSEWHERE: Refusals = {
    "defer_loading": ((False,), "every tool is in the prompt"),
    "allowed_callers": ((["direct"],), "only the model calls tools"),
    "async": ((False,), "the agent waits for every call"),
    "output_schema": ((), "no template has a place for it; put it into the description"),
    "input_examples": (([],), "no template has a place for it; put it into the description"),
}

FORMAT = _fields("type json_schema name description schema strict")
CHOICE = _fields("type function name disable_parallel_tool_use")
NAMED = _fields("name")

# Chat

SAID = _fields(f"role content name {MARKS}", {"tool_calls": (([],), "only an answer has calls")})
ANSWERED = _fields(
    f"role content name tool_calls function_call reasoning_content reasoning refusal {MARKS}"
    " annotations parsed provider_specific_fields",
    {
        "audio": NO_SOUND,
        "reasoning_details": (([],), "send reasoning_content"),
        "thinking_blocks": (([],), "send reasoning_content"),
        "images": (([],), "this model writes text only"),
        "prefix": ((False,), "use continue_final_message"),
        "partial": ((False,), "use continue_final_message"),
    },
)
"""An answer that comes back. `parsed` and `annotations` are read from its text, by an SDK or a server."""
RESULT = _fields(f"role content name tool_call_id {MARKS}", SAID.refused)
CHAT_MESSAGES = {
    **dict.fromkeys(("system", "developer", "user"), SAID),
    **dict.fromkeys(("tool", "function"), RESULT),
    "assistant": ANSWERED,
}
"""By role."""
TEXT_PART = _fields(f"type text annotations logprobs parsed {MARKS}")
REFUSAL_PART = _fields(f"type refusal {MARKS}")
DETAIL: Refusals = {"detail": (("auto", "high", "original"), "auto or high: images are not made smaller")}
IMAGE_PART = _fields(f"type image_url {MARKS}")
IMAGE_URL = _fields("url", DETAIL)
CHAT_CALL = _fields(f"id type function index provider_specific_fields {MARKS}")
CALLED = _fields("name arguments parsed_arguments")
CHAT_TOOL = _fields(f"type function {MARKS}")
FUNCTION = _fields("name description parameters strict")

# Responses

OWN = "type id status internal_chat_message_metadata_passthrough"
"""Fields of every item; Codex sends the last one."""
ITEMS = {
    "message": _fields(f"{OWN} role content phase"),
    "reasoning": _fields(f"{OWN} summary content encrypted_content"),
    "function_call": _fields(f"{OWN} call_id name arguments parsed_arguments", DIRECT),
    "function_call_output": _fields(f"{OWN} call_id output name", DIRECT),
    "item_reference": _fields("type id"),
}
"""By type. `status`, `phase` and `id` change none of an item's tokens."""
INPUT_IMAGE = _fields(
    f"type image_url {MARKS}", {**DETAIL, "file_id": ((), "no files are stored; give an image_url")}
)
RESPONSES_TOOL = _fields("type name description parameters strict", ELSEWHERE)

# Messages

MESSAGE = _fields("role content")
BLOCKS = {
    "text": _fields("type text cache_control citations"),
    "thinking": _fields("type thinking signature cache_control"),
    "redacted_thinking": _fields("type data cache_control"),
    "tool_use": _fields("type id name input cache_control", DIRECT),
    "tool_result": _fields("type tool_use_id content is_error cache_control", DIRECT),
    "document": _fields(
        "type source cache_control",
        {
            "title": ((), "put it into the text"),
            "context": ((), "put it into the text"),
            "citations": (({"enabled": False},), "this model cites no documents"),
        },
    ),
}
"""By type. A failed tool says so in its text, so `is_error` is accepted."""
SOURCE = _fields("type media_type data")
IMAGE_BLOCK = _fields("type source cache_control")
IMAGE_SOURCE = _fields(
    "type media_type data url", {"file_id": ((), "no files are stored; give the image itself")}
)
MESSAGES_TOOL = _fields(
    "type name description input_schema strict cache_control eager_input_streaming", ELSEWHERE
)
