"""Makes an action of what the model wrote.

1. The whole answer is a JSON object, also in a fenced block: that is the action.
2. The schema has exactly one required field: the text is that field, in the field's type.
3. There is a JSON object in the text: the last one is the action.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from environments.errors import NoAction

TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
OF_TOOLS = ("call_tool", "list_tools")
MOST_SHOWN = 200
"""The most characters of an answer that its error repeats."""
MOST_BRACES = 256
"""At so many braces of a text an object is looked for: each look may read the text to its end."""
NO_JSON: Any = object()
Resolve = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ActionSchema:
    """The JSON schema of an environment's actions. `metadata` is a field of every action, and nobody's."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self.fields: dict[str, Any] = dict(schema.get("properties") or {})
        self.fields.pop("metadata", None)
        self.required: list[str] = [name for name in schema.get("required") or () if name != "metadata"]

    @property
    def of_tools(self) -> bool:
        """Whether actions are calls of tools (the kind MCP): OpenEnv's own classes describe them, or none."""
        return not self.fields or self.fields.get("type", {}).get("const") in OF_TOOLS

    def action_of(self, answer: str) -> dict[str, Any]:
        """The action. Raises NoAction with a sentence for the model."""
        whole = _json_of(_without_fence(answer.strip()))
        if isinstance(whole, dict):
            return whole
        if self.of_tools:
            raise NoAction("an action is a call of one of the tools")
        if len(self.required) == 1:
            (name,) = self.required
            return {name: self._value(name, answer)}
        if (last := _last_object(answer)) is not None:
            return last
        raise NoAction(f"an action is a JSON object with the fields {', '.join(self.fields)}")

    def _value(self, name: str, answer: str) -> Any:
        """The text in the field's type. A free text stays as it is; spaces around another value are not part
        of it."""
        field = self._resolved(self.fields.get(name, {}))
        kinds = _types(field, self._resolved)
        if kinds == {"string"} and not {"enum", "const"} & set(field):
            return answer
        text = answer.strip()
        value = _json_of(text)
        if value is not NO_JSON and (not kinds or any(_is_a(value, kind) for kind in kinds - {"string"})):
            return value
        if not kinds or "string" in kinds:
            return text
        wanted = " or ".join(sorted(kinds))
        raise NoAction(f"{text[:MOST_SHOWN]!r} is no {wanted}, which the field {name!r} needs")

    def _resolved(self, field: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a reference to `#/$defs/NAME` means."""
        name = str(field.get("$ref", "")).rpartition("/")[2]
        found: Mapping[str, Any] = (self._schema.get("$defs") or {}).get(name, field)
        return found


def _types(field: Mapping[str, Any], resolved: Resolve) -> set[str]:
    """The JSON types that a field may have; none if the schema does not say."""
    kind = field.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return set(kind)
    choices = field.get("anyOf") or field.get("oneOf") or ()
    return {kind for each in choices for kind in _types(resolved(each), lambda deeper: deeper)}


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return kind in TYPES and isinstance(value, TYPES[kind])


def _json_of(text: str) -> Any:
    """The value, or NO_JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NO_JSON


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _without_fence(text: str) -> str:
    """The content of a text that is one fenced block."""
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text[text.index("\n") + 1 : -3].strip()
    return text


def _last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object that is not part of another one."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    found, place = None, text.find("{")
    for _ in range(MOST_BRACES):
        if place < 0:
            break
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found
