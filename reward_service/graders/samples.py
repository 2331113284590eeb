"""What graders read of an answer: OpenAI's namespace `sample`."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn


def sample_of(
    text: str, message: Mapping[str, Any] | None = None, finish_reason: str = "stop"
) -> dict[str, Any]:
    """The answer with this text. `message` is the whole message of the answer, with its tool calls.

    `output_json` is there if the text is JSON.
    """
    whole = dict(message or {"role": "assistant", "content": text})
    sample = {
        "output_text": text,
        "output_tools": whole.get("tool_calls") or [],
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": whole}],
    }
    try:
        return sample | {"output_json": json.loads(text, parse_constant=_refuse)}
    except (ValueError, RecursionError):
        return sample


def _refuse(constant: str) -> NoReturn:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
