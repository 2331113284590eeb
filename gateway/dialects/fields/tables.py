"""The tables of fields: by request and by object, what is accepted, and what is refused and why.

The fields of requests that are served are those of the requests' structs (`chat_wire.py` and its like).
"""

from collections.abc import Mapping
from typing import Any

from gateway.dialects.fields.checks import Fields, Refusals, check_fields
from gateway.dialects.fields.unknown import note_unknown

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
