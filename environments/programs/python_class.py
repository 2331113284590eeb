"""`python:MODULE:CLASS`: a class of the user, with Gymnasium's `step` and a `reset` that takes the task.

class Double:
    def tasks(self, seed):              # without it: {"seed": 0}, {"seed": 1}, …
        return ({"number": n} for n in range(10))
    def reset(self, task):
        self.number = task["number"]
        return f"double of {self.number}?"
    def step(self, answer):
        return None, float(answer == str(2 * self.number)), True, False, {}

What `step` returns is: what the model reads next, the reward of its answer, whether the episode ended,
whether it was cut off, and numbers to record. `tools = ("look",)` offers methods to the model. A method
returns what the model reads, or the five values of `step`.
`len()` says how many tasks there are. A game sets `players = 2`; `player` says whose turn is next, and
`rewards` what each of them has won.
"""

import importlib
import inspect
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_answers

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
        return host_answers.step(_result(f"error: there is no tool {name!r}, only {', '.join(functions)}"))
    try:
        given = json.loads(arguments or "{}")
        bound = inspect.signature(functions[name]).bind(**given)
    except (ValueError, TypeError) as error:
        return host_answers.step(_result(f"error: {error}"))
    result = functions[name](*bound.args, **bound.kwargs)
    if isinstance(result, tuple) and len(result) == OF_A_STEP:
        return host_answers.step(_result(result[0]), *result[1:])
    return host_answers.step(_result(result))


def _result(result: Any) -> dict[str, Any]:
    return {"role": "tool", "content": result if isinstance(result, str) else json.dumps(result)}


def environments(name: str, options: dict[str, Any]) -> "UserEnvironments":
    module, _, attribute = name.partition(":")
    sys.path.append(str(Path.cwd()))
    return UserEnvironments(name, _class_of(module, attribute or "Environment"), options)


def _class_of(module: str, attribute: str) -> Any:
    """Raises host_answers.Mistake if there is no such module or class."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another one
        raise host_answers.Mistake(
            f"there is no module {module!r}, neither in {Path.cwd()} nor installed: run `weir env` where its "
            "file is"
        ) from None
    if not hasattr(found, attribute):
        classes = [name for name, each in vars(found).items() if isinstance(each, type)]
        raise host_answers.Mistake(
            f"the module {module!r} has no class {attribute!r}; it has {', '.join(classes) or 'none'}"
        )
    return getattr(found, attribute)


class UserEnvironments:
    def __init__(self, name: str, made: Any, options: dict[str, Any]) -> None:
        self._name, self._made, self._options = name, made, options
        try:
            self._probe = made(**options)
        except TypeError as error:
            if not options:
                raise
            raise host_answers.Mistake(
                f"{name} cannot be made with the options {', '.join(options)}: {error}"
            ) from error

    def describe(self) -> dict[str, Any]:
        tools = [tool(each) for each in _tools(self._probe).values()]
        count = len(self._probe) if hasattr(self._probe, "__len__") else None
        players = getattr(self._probe, "players", 1)
        return {"name": f"python:{self._name}", "tools": tools, "task_count": count, "players": players}

    def tasks(self, seed: int, start: int, count: int) -> list[dict[str, Any]]:
        if not hasattr(self._probe, "tasks"):
            return [{"id": f"{seed + n}", "data": {"seed": seed + n}} for n in range(start, start + count)]
        drawn = itertools.islice(self._probe.tasks(seed), start, start + count)
        return [{"id": f"{seed}:{number}", "data": task} for number, task in enumerate(drawn, start)]

    def new(self) -> "UserEnvironment":
        return UserEnvironment(self._made(**self._options))


class UserEnvironment:
    def __init__(self, environment: Any) -> None:
        self._environment, self._tools = environment, _tools(environment)

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        return host_answers.step(self._environment.reset(data)) | self._game()

    def step(self, answer: str) -> dict[str, Any]:
        return host_answers.step(*self._environment.step(answer)) | self._game()

    def _game(self) -> dict[str, Any]:
        """Whose turn is next, and what each player has won, in an environment with several players."""
        if getattr(self._environment, "players", 1) == 1:
            return {}
        rewards = getattr(self._environment, "rewards", None) or {}
        return {
            "player": self._environment.player,
            "rewards": {str(who): host_answers.number(rewards[who]) for who in rewards},
        }

    def call(self, name: str, arguments: str) -> dict[str, Any]:
        return call(self._tools, name, arguments) | self._game()

    def close(self) -> None:
        if hasattr(self._environment, "close"):
            self._environment.close()


def _tools(environment: Any) -> dict[str, Any]:
    given = getattr(environment, "tools", ())
    found = [getattr(environment, each) if isinstance(each, str) else each for each in given]
    return {each.__name__: each for each in found}
