"""Refuses by name the fields of a request that the gateway cannot serve.

A field is served, or it changes no token and is accepted (`prompt_cache_key`), or it is refused here, unless
its value asks for nothing. `decode_body` refuses fields that no contract has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.errors import InvalidRequest

MAX_METADATA_BYTES = 16 * 2**10
"""Limit on the JSON of `metadata`."""

Refusals = Mapping[str, tuple[Sequence[Any], str]]
"""By field: the values that ask for nothing, beside null; and why any other value is refused."""

CHAT: Refusals = {
    "audio": ((), "this model writes text only"),
    "modalities": ((["text"],), "this model writes text only"),
    "web_search_options": ((), "this gateway does not search"),
    "moderation": ((), "this gateway does not moderate"),
}
RESPONSES: Refusals = {
    "background": ((False,), "this gateway does not serve it"),
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
