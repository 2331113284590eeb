"""The formats in which a model that grades answers, and how its answers are read.

score_model  {"steps": [{"description", "conclusion"}], "result": number}    as OpenAI's guide shows it
label_model  {"steps": […], "result": one of the labels}
"""

import json
import math
from collections.abc import Sequence
from typing import Any

MAX_ANSWER_CHARS = 2**18


class UnreadableVerdict(Exception):
    """The model's answer has no result."""


def score_format() -> dict[str, Any]:
    """The `response_format` for a score."""
    return _format("score", {"type": "number"})


def label_format(labels: Sequence[str]) -> dict[str, Any]:
    """The `response_format` for a label."""
    return _format("label", {"type": "string", "enum": list(labels)})


def read_score(answer: str) -> float:
    """The finite number in an answer. An answer that is only a number counts, because prompts ask for it.

    Raises UnreadableVerdict.
    """
    result = _result(answer)
    try:
        score = float("nan" if isinstance(result, bool | None) else result)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnreadableVerdict(f"the model answered {answer[:200]!r}, and not a number") from error
    if not math.isfinite(score):
        raise UnreadableVerdict(f"the model answered {answer[:200]!r}, and not a finite number")
    return score


def read_label(answer: str, labels: Sequence[str]) -> str:
    """The label that an answer names. Raises UnreadableVerdict."""
    result = _result(answer)
    if result not in labels:
        raise UnreadableVerdict(f"the model answered {answer[:200]!r}, and not one of the labels")
    return str(result)


def _result(answer: str) -> Any:
    """The field `result` of an answer that is an object; any other answer itself."""
    text = answer[:MAX_ANSWER_CHARS].strip()
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed.get("result") if isinstance(parsed, dict) else parsed


def _format(name: str, result: dict[str, Any]) -> dict[str, Any]:
    step = {
        "type": "object",
        "properties": {"description": {"type": "string"}, "conclusion": {"type": "string"}},
        "required": ["description", "conclusion"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {"steps": {"type": "array", "items": step}, "result": result},
        "required": ["steps", "result"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}
