"""What a server's observation becomes for the model, and for the trainer.

A field that is null or empty says nothing, and `metadata` is shown only if nothing else is there. If one text
is left, the model reads it as it is; otherwise it reads the fields as JSON. The option `text` names a field
that the model reads alone. `metadata` gives the numbers that are recorded.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from environments.errors import EnvironmentFault
from environments.step import Message, Step

EMPTY: tuple[Any, ...] = (None, "", [], {})
BROKEN = "transport_error"


class ObservationData(msgspec.Struct, frozen=True):
    """The `data` of a server's message `observation`. `reward` belongs to the last action; null is no
    opinion."""

    observation: dict[str, Any]
    reward: bool | float | None = None
    done: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        given = self.observation.get("metadata")
        return given if isinstance(given, dict) else {}


def observation_of(data: Any) -> ObservationData:
    """Raises EnvironmentFault if it is malformed."""
    try:
        return msgspec.convert(data, ObservationData)
    except msgspec.ValidationError as error:
        raise EnvironmentFault(f"the server's observation is malformed: {error}") from None


def step_of(data: ObservationData, field: str | None) -> Step:
    """The step, with a message of the user. `field` is the only one that the model reads, if it is named."""
    return _step(data, {"role": "user", "content": _shown(data, field)})


def result_of(data: ObservationData) -> Step:
    """The step of a tool's call. Raises EnvironmentFault if the tool was not reached."""
    error = data.observation.get("error")
    if isinstance(error, dict):
        if error.get("error_type") == BROKEN:
            raise EnvironmentFault(f"a tool was not reached: {error.get('message')}")
        return _step(data, tool_message(f"error: {error.get('message')}"))
    return _step(data, tool_message(_tool_text(data.observation.get("result"))))


def tool_message(text: str) -> Message:
    return {"role": "tool", "content": text}


def _step(data: ObservationData, message: Message) -> Step:
    reward = None if data.reward is None else float(data.reward)
    if reward is not None and not math.isfinite(reward):
        raise EnvironmentFault(f"a reward must be finite, not {reward}")
    numbers = {
        str(name): float(value)
        for name, value in data.metadata.items()
        if isinstance(value, bool | int | float) and math.isfinite(value)
    }
    return Step(messages=(message,), reward=reward, terminated=data.done, metrics=numbers)


def _shown(data: ObservationData, field: str | None) -> str:
    if field is not None:
        if field not in data.observation:
            known = ", ".join(data.observation)
            raise EnvironmentFault(f"the observation has no field {field!r}, only {known}")
        return _text(data.observation[field])
    fields = {name: value for name, value in data.observation.items() if name != "metadata"}
    said = _that_say_something(fields) or _that_say_something(data.metadata)
    values = list(said.values())
    return _text(values[0] if len(values) == 1 and isinstance(values[0], str) else said)


def _that_say_something(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not any(value == each for each in EMPTY)}


def _tool_text(result: Any) -> str:
    """The texts of an MCP result; another result as JSON."""
    content = result.get("content") if isinstance(result, dict) else None
    texts = [each["text"] for each in content or () if isinstance(each, dict) and _has_text(each)]
    if content and len(texts) == len(content):
        return "\n".join(texts)
    return _text(result)


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
