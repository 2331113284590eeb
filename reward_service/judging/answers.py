"""The formats in which a model that grades answers, and how its answers are read.

score_model  {"steps": [{"description", "conclusion"}], "result": number}    as OpenAI's guide shows it
label_model  {"steps": […], "result": one of the labels}

Some models think aloud first, or put the object into a fence of Markdown, or into prose.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

MAX_ANSWER_CHARS = 2**18
MAX_BRACES = 1000
"""How many braces may open in an answer that has more than an object."""
THOUGHT_END = "</think>"
FENCE = re.compile(r"```[^\n`]*\n(.*)```", re.DOTALL)


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
    """The label that an answer names, in upper or lower case. Raises UnreadableVerdict."""
    result = _result(answer)
    result = "" if isinstance(result, dict | list | None) else str(result)
    named = [each for each in labels if each == result] or [
        each for each in labels if each.strip().casefold() == result.strip().casefold()
    ]
    if len(named) != 1:
        raise UnreadableVerdict(f"the model answered {answer[:200]!r}, and not one of the labels")
    return named[0]


def _result(answer: str) -> Any:
    """The field `result` of an answer that is an object; any other answer itself."""
    value = value_of(answer, "result")
    return value.get("result") if isinstance(value, dict) else value


def value_of(answer: str, field: str) -> Any:
    """The JSON in an answer: all of it, or what its fence has, or its one object with this field. An answer
    without JSON is its text.

    Objects that differ are no verdict, wherever they stand: a model may quote one that an attempt wrote.
    """
    whole = answer[:MAX_ANSWER_CHARS].strip()
    # A verdict may have the mark in its own words.
    texts = [whole, whole.partition(THOUGHT_END)[2].strip(), whole.rpartition(THOUGHT_END)[2].strip()]
    for candidate in (each for text in texts for each in (text, _inside(text))):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    objects = _objects(texts[-1], field)
    if objects and all(each == objects[0] for each in objects):
        return objects[0]
    return _inside(texts[-1])


def _inside(text: str) -> str:
    """What the fence has, if the text is nothing but a fence."""
    fence = FENCE.fullmatch(text)
    return fence[1].strip() if fence else text


def _objects(text: str, field: str) -> list[dict[str, Any]]:
    """The objects with this field that a text has, one behind the other."""
    found, place, decoder = list[dict[str, Any]](), text.find("{"), json.JSONDecoder()
    for _ in range(MAX_BRACES):
        if place < 0:
            return found
        try:
            value, end = decoder.raw_decode(text, place)
        except RecursionError:
            return []
        except ValueError:
            value, end = None, place + 1
        if isinstance(value, dict) and field in value:
            found.append(value)
        place = text.find("{", end)
    return []


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
