"""Checks the fields of requests and of the objects inside them: notes unknown ones, refuses others by name.

A field is accepted if the gateway serves it, or if it changes no token (`prompt_cache_key`). A field that
would change the prompt, the sampling or the answer, and is not served, is accepted only with a value that
asks for nothing. Any other field is unknown (`body_decoding.py`): the call is served and names it, or is
refused.

with Reading(report=True) as ignored ── decode_body, check_fields ──▶ note_unknown("messages[1].mood")
ignored.paths ──▶ the turn's `ignored_fields`, the header `x-weir-ignored-fields`, the metric

The tables say, by request and by object, what is accepted, and what is refused and why. The fields of
requests that are served are those of the requests' structs (`chat_wire.py` and its like).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any
from urllib.parse import quote

import msgspec

from gateway.errors import invalid

MOST_PATHS = 32
MOST_PATH_CHARS = 128
MOST_HEADER_CHARS = 2048
"""aiohttp refuses a header over 8 KiB, Node headers over 16 KiB in total."""


class Reading:
    """A block that reads one request, whose unknown fields it collects; without `report` they are refused."""

    def __init__(self, *, report: bool) -> None:
        self._report = report
        self._outside: Token[Reading | None]
        self.paths: list[str] = []
        """The paths of the fields that the gateway ignores: the first MOST_PATHS."""

    def __enter__(self) -> "Reading":
        self._outside = _READING.set(self if self._report else None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _READING.reset(self._outside)

    def add(self, path: str) -> None:
        shown = path if len(path) <= MOST_PATH_CHARS else path[: MOST_PATH_CHARS - 1] + "…"
        if len(self.paths) < MOST_PATHS and shown not in self.paths:
            self.paths.append(shown)


_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)
"""Of the request that is being read. None: an unknown field is refused."""


def note_unknown(path: str) -> None:
    """Note an unknown field. Raises InvalidRequest that names it, if such fields are refused."""
    if (ignored := _READING.get()) is None:
        raise invalid(path, "unknown field", code="unknown_parameter")
    ignored.add(path)


def ignored_header(paths: tuple[str, ...]) -> dict[str, str]:
    """The header that names ignored fields. All but letters, digits and `[]._-~` is percent-encoded UTF-8, so
    a header can hold it, and a comma only separates. Paths that do not fit are left out."""
    named = ""
    for path in paths:
        more = (", " if named else "") + quote(path, safe="[]", errors="replace")
        if len(named) + len(more) > MOST_HEADER_CHARS:
            break
        named += more
    return {"x-weir-ignored-fields": named} if paths else {}


MAX_METADATA_BYTES = 16 * 2**10
"""Limit on the JSON of `metadata`."""

Refusals = Mapping[str, tuple[Sequence[Any], str]]
"""By field: the values that are accepted because they ask for nothing, as null does; why others are not."""

VERBOSITIES = ("low", "medium", "high")


def verbosity_of(value: Any, param: str) -> Mapping[str, str]:
    """The verbosity that a call asks for, as its turn records it. The model has one level, which serves all
    three: SDKs send one by default. Raises InvalidRequest for any other value."""
    if value is None:
        return {}
    if value not in VERBOSITIES:
        raise invalid(param, f"one of {', '.join(VERBOSITIES)}")
    return {"verbosity": value}


def refuse_unserved(body: msgspec.Struct, refusals: Refusals) -> None:
    """Raises InvalidRequest that names the first field whose value the gateway cannot serve."""
    for name, (neutral, reason) in refusals.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise invalid(name, reason)


def check_metadata(metadata: Mapping[str, Any] | None, param: str = "metadata") -> None:
    """Raises InvalidRequest for metadata over the limit, in the field `param`."""
    if metadata and len(msgspec.json.encode(metadata)) > MAX_METADATA_BYTES:
        raise invalid(param, f"more than {MAX_METADATA_BYTES} bytes of JSON")


class Fields(msgspec.Struct, frozen=True):
    """The fields of one kind of object."""

    accepted: frozenset[str]
    """Names of the fields that the gateway reads, or that change no token."""
    refused: Refusals = {}
    """Other fields that clients send: the values that ask for nothing, and why any other value is refused."""


def check_fields(given: Mapping[str, Any], fields: Fields, where: str) -> None:
    """Note the unknown fields of the object `where`. Raises InvalidRequest that names a refused one."""
    if given.keys() <= fields.accepted:
        return
    for name, value in given.items():
        if name not in fields.accepted:
            check_unread(name, value, fields.refused, f"{where}.{name}")


def check_names(names: Iterable[tuple[str, str]]) -> None:
    """Raises InvalidRequest for a tool with the name of an earlier one; each name comes with its path."""
    known: set[str] = set()
    for path, name in names:
        if name in known:
            raise invalid(path, f"another tool has the name {name[:128]!r}, too")
        known.add(name)


def check_unread(name: str, value: Any, refusals: Refusals, path: str) -> None:
    """Note a field that the gateway does not read, if nobody knows it. Raises InvalidRequest if it is one of
    `refusals`, and its value asks for something."""
    if value is None:
        return
    if name not in refusals:
        note_unknown(path)
    elif value not in refusals[name][0]:
        raise invalid(path, refusals[name][1])


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


# Objects inside requests


def check_format(form: Any, where: str) -> None:
    """Note the unknown fields of a format such as `response_format`."""
    if isinstance(form, dict):
        check_fields(form, FORMAT, where)
        check_format(form.get("json_schema"), f"{where}.json_schema")


def check_choice(choice: Any) -> None:
    """Note the unknown fields of `tool_choice`."""
    if isinstance(choice, Mapping):
        check_fields(choice, CHOICE, "tool_choice")
        _check_allowed(choice.get("tools"), "tool_choice.tools")
        for name, fields in (("function", NAMED), ("allowed_tools", ALLOWED)):
            if isinstance(inner := choice.get(name), dict):
                check_fields(inner, fields, f"tool_choice.{name}")
                _check_allowed(inner.get("tools"), f"tool_choice.{name}.tools")


def _check_allowed(tools: Any, where: str) -> None:
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        place = f"{where}[{at}]"
        if not isinstance(tool, dict):
            note_unknown(place)
        elif tool.get("type") == "function":
            check_fields(tool, ALLOWED_TOOL, place)
            if isinstance(function := tool.get("function"), dict):
                check_fields(function, ALLOWED_TOOL, f"{place}.function")


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
ALLOWED = _fields("mode tools")
ALLOWED_TOOL = _fields("type function name description parameters strict")
"""Some clients name a tool by all of its definition."""
ONLY_FUNCTIONS = ((), "this gateway serves functions only")
CHOICE = _fields(
    "type function name disable_parallel_tool_use allowed_tools mode tools",
    {"custom": ONLY_FUNCTIONS, "server_label": ONLY_FUNCTIONS},
)
NAMED = _fields("name")

# Chat

SAID = _fields(
    f"role content name id {MARKS}",
    {
        "tool_calls": (([],), "only an answer has calls"),
        "images": (([],), "put images into the content"),
    },
)
ANSWERED = _fields(
    f"role content name tool_calls function_call reasoning_content reasoning refusal {MARKS}"
    " annotations parsed provider_specific_fields id index status phase logprobs",
    {
        "audio": NO_SOUND,
        "reasoning_details": (([],), "send reasoning_content"),
        "thinking_blocks": (([],), "send reasoning_content"),
        "images": (([],), "this model writes text only"),
        "prefix": ((False,), "use continue_final_message"),
        "partial": ((False,), "use continue_final_message"),
    },
)
"""An answer that comes back. `parsed` and `annotations` are read from its text, by an SDK or a server;
harnesses that keep histories add the fields from `id` on."""
RESULT = _fields(f"role content name tool_call_id id {MARKS}", SAID.refused)
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
CHAT_TOOL = _fields(f"type function {MARKS}", ELSEWHERE)
FUNCTION = _fields("name description parameters strict", ELSEWHERE)

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
TEXT = _fields("format verbosity")
REASONING = _fields(
    "effort summary generate_summary",
    {
        "context": (
            ("auto",),
            "a session chooses which thoughts its prompts keep: thinking in POST /sessions",
        ),
        "mode": (("standard",), "this model has one mode"),
    },
)

# Messages

MESSAGE = _fields(
    "role content output_config",
    {"clear_at": (("never",), "this gateway takes no message out of a history")},
)
MESSAGE_CONFIG = _fields("effort", {"format": ((), "put it into the call's own output_config")})
OUTPUT_CONFIG = _fields("format effort", {"task_budget": ((), "this model is told no budget")})
THINKING = _fields(
    "type budget_tokens display",
    {"block_binding": (({},), "a thought that has another text than was signed is always refused")},
)
BLOCKS = {
    "text": _fields("type text cache_control citations"),
    "thinking": _fields("type thinking signature cache_control"),
    "redacted_thinking": _fields("type data cache_control"),
    "tool_use": _fields("type id name input cache_control", DIRECT),
    "tool_result": _fields("type tool_use_id content is_error cache_control", DIRECT),
    "tool_reference": _fields("type tool_name cache_control"),
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
IMAGE_BLOCK = _fields(
    "type source cache_control",
    {"transformations": (({},), "this gateway prepares all images in one way")},
)
IMAGE_SOURCE = _fields(
    "type media_type data url", {"file_id": ((), "no files are stored; give the image itself")}
)
MESSAGES_TOOL = _fields(
    "type name description input_schema strict cache_control eager_input_streaming defer_loading", ELSEWHERE
)
