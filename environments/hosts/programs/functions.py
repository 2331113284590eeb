"""Offers Python functions to the model as tools, with a JSON schema made of their signatures."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import said

OF_A_STEP = 5
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tool(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool as chat completions describe it. A parameter without a type is a string."""
    parameters = inspect.signature(function, eval_str=True).parameters
    known = {
        name: {"type": TYPES.get(each.annotation, "string")}
        for name, each in parameters.items()
        if name != "self"
    }
    needed = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    schema = {"type": "object", "properties": known, "required": needed, "additionalProperties": False}
    described = {
        "name": function.__name__,
        "description": inspect.getdoc(function) or "",
        "parameters": schema,
    }
    return {"type": "function", "function": described}


def call(functions: dict[str, Callable[..., Any]], name: str, arguments: str) -> dict[str, Any]:
    """The step that a call makes. The model reads its own mistakes; other errors are the environment's.

    A function returns what the model reads, or the five values of Gymnasium's `step`, which begin with it."""
    if name not in functions:
        return said.step(_result(f"error: there is no tool {name!r}, only {', '.join(functions)}"))
    try:
        given = json.loads(arguments or "{}")
        bound = inspect.signature(functions[name]).bind(**given)
    except (ValueError, TypeError) as error:
        return said.step(_result(f"error: {error}"))
    result = functions[name](*bound.args, **bound.kwargs)
    if isinstance(result, tuple) and len(result) == OF_A_STEP:
        return said.step(_result(result[0]), *result[1:])
    return said.step(_result(result))


def _result(result: Any) -> dict[str, Any]:
    return {"role": "tool", "content": result if isinstance(result, str) else json.dumps(result)}
