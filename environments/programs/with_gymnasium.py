"""`gymnasium:ID`: an environment whose observations are texts, or values that are shown as Python writes
them.

An action is the model's text, read as the action space needs it: as it is, as a number, or as JSON. A text
that is no action is answered with an error that the model reads, without a reward.
"""

import json
from typing import Any

import gymnasium
import host_answers


def environments(name: str, options: dict[str, Any]) -> "GymnasiumEnvironments":
    return GymnasiumEnvironments(name, options)


class GymnasiumEnvironments:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._options = name, options
        spec = gymnasium.spec(name)  # an unknown name is an error now
        if isinstance(spec.entry_point, str):  # its module is imported once, and not for each episode
            gymnasium.envs.registration.load_env_creator(spec.entry_point)

    def describe(self) -> dict[str, Any]:
        return {"name": f"gymnasium:{self._name}", "version": gymnasium.__version__}

    def tasks(self, seed: int, start: int, count: int) -> list[dict[str, Any]]:
        return host_answers.seeded_tasks(seed, start, count)

    def new(self) -> "GymnasiumEnvironment":
        return GymnasiumEnvironment(gymnasium.make(self._name, **self._options))


class GymnasiumEnvironment:
    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        observation, info = self._environment.reset(seed=data["seed"])
        return host_answers.step(shown(observation), info=info)

    def step(self, answer: str) -> dict[str, Any]:
        space = self._environment.action_space
        action = action_of(space, answer.strip())
        if action is None or not space.contains(action):
            return host_answers.step(f"error: {answer.strip()[:200]!r} is no action of {space}")
        observation, *rest = self._environment.step(action)
        return host_answers.step(shown(observation), *rest)

    def close(self) -> None:
        self._environment.close()


def shown(observation: Any) -> str:
    return observation if isinstance(observation, str) else str(observation)


def action_of(space: Any, answer: str) -> Any:
    """The action, or None for a text that is none."""
    if isinstance(space, gymnasium.spaces.Text):
        return answer
    try:
        value = json.loads(answer)
    except ValueError:
        return None
    if isinstance(space, gymnasium.spaces.Discrete):
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    try:
        return space.from_jsonable([value])[0]
    except (TypeError, ValueError, IndexError, KeyError):
        return None
