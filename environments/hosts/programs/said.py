"""Writes what an environment says in the form that the runner reads (`environments/step.py`)."""

import math
from typing import Any

MOST_ERROR = 2000
"""The most characters of an error's text."""


class Mistake(Exception):
    """The user named what does not exist. The text is the whole sentence."""


def fault(error: BaseException) -> str:
    """An error as the runner tells it."""
    return str(error) if isinstance(error, Mistake) else f"{type(error).__name__}: {error}"[:MOST_ERROR]


def step(
    observation: Any,
    reward: Any = None,
    terminated: bool = False,
    truncated: bool = False,
    info: Any = None,
    player: int = 0,
    rewards: Any = None,
) -> dict[str, Any]:
    """The five values of Gymnasium's `step`. An observation is a text, a message or a list of messages."""
    said = {"messages": messages(observation), "player": player}
    said |= {"terminated": bool(terminated), "truncated": bool(truncated)}
    said |= {"reward": number(reward), "metrics": metrics(info)}
    return said | (
        {"rewards": {str(who): number(value) for who, value in rewards.items()}} if rewards else {}
    )


def messages(observation: Any) -> list[dict[str, Any]]:
    if observation is None or observation == "":
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [observation] if isinstance(observation, dict) else list(observation)


def number(value: Any) -> float | None:
    """A finite number, or None. Raises ValueError for NaN and infinity: they must not become rewards."""
    if value is None:
        return None
    if not math.isfinite(value := float(value)):
        raise ValueError(f"a reward must be finite, not {value}")
    return value


def metrics(info: Any) -> dict[str, float]:
    """The finite numbers of Gymnasium's `info`; the rest of it is the environment's own."""
    known = (info or {}).items()
    return {str(name): float(value) for name, value in known if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)
