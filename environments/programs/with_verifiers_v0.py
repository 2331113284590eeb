"""`verifiers_v0:ENVIRONMENT`: an environment of verifiers 0.1, which the library plays in this process.

Each rollout gets a client whose address is that of its session, so its calls belong to the session. Each turn
is asked for with its token ids and logprobs, and the library keeps them in its `tokens`.

options  split    "eval" for the environment's own evaluation data; otherwise its training data
         max_turns  the most answers, for an environment that names no limit
         wait_s  how long a model call is repeated; the runner sets it
         others are those of the environment's `load_environment`
"""

import contextvars
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import host_answers
import verifiers as vf
from patience import patient_client

TOKENS = {"logprobs": True, "extra_body": {"return_token_ids": True}}
ANSWER_S = 600.0

failures: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failures")
"""What the reward functions of the rollout that is scored have raised."""


def library(name: str, options: dict[str, Any]) -> "ScoredRollouts":
    return ScoredRollouts(name, dict(options))


class ScoredRollouts:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name = name
        split, max_turns = options.pop("split", "train"), options.pop("max_turns", None)
        wait_s = options.pop("wait_s")
        self._environment = vf.load_environment(name, **options)
        self._rows = (
            self._environment.get_eval_dataset() if split == "eval" else self._environment.get_dataset()
        )
        self._cut_at = max_turns if getattr(self._environment, "max_turns", 0) == -1 else None
        if self._cut_at:
            self._environment.max_turns = self._cut_at
        for rubric in rubrics_of(self._environment.rubric):
            rubric.funcs = [heard(function) for function in rubric.funcs]
        self._client = patient_client(
            wait_s, time.monotonic, ANSWER_S, base_url="http://unset", api_key="unset"
        )

    async def start(self) -> None:
        """Raises ValueError for an environment that cannot score one rollout alone."""
        for rubric in rubrics_of(self._environment.rubric):
            for function in rubric.funcs:
                if compares(function):
                    raise ValueError(
                        f"the reward {function.__name__!r} compares the rollouts of a group, and Weir has "
                        "each rollout scored alone"
                    )

    async def stop(self) -> None:
        await self._client.close()

    async def describe(self) -> dict[str, Any]:
        return {
            "name": f"verifiers_v0:{self._name}",
            "version": version("verifiers"),
            "task_count": len(self._rows),
        }

    async def tasks(self, seed: int, start: int, count: int) -> list[dict[str, Any]]:
        return [
            {"id": str(self._rows[number]["example_id"]), "data": {"number": number}}
            for number in range(start, min(len(self._rows), start + count))
        ]

    async def play(
        self, data: dict[str, Any], sessions: list[dict[str, str]], model: str, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        (session,) = sessions
        client = self._client.with_options(base_url=session["base_url"], api_key=session["api_key"])
        body = {**(sampling.get("extra_body") or {}), **TOKENS["extra_body"]}
        asked = {**self._environment.sampling_args, **sampling, **TOKENS, "extra_body": body}
        raised: list[str] = []
        failures.set(raised)
        scores = self._environment.score_rollouts
        state = await self._environment.run_rollout(
            dict(self._rows[data["number"]]), client, model, asked, nullcontext(), nullcontext(), score=scores
        )
        return self._told(state, session["session_id"], raised, scores)

    def _told(self, state: Any, session_id: str, raised: list[str], scored: bool) -> dict[str, Any]:
        error = state.get("error")
        errors = [f"{type(error).__name__}: {error}"] if error is not None else raised
        stopped_by = state.get("stop_condition")
        cut = stopped_by == "prompt_too_long" or (stopped_by == "max_turns_reached" and bool(self._cut_at))
        rewards = self._rewards(state) if scored and not errors else {}
        turns = state["trajectory"]
        metrics = host_answers.metrics(state.get("metrics"))
        metrics["turns_without_tokens"] = float(sum(turn["tokens"] is None for turn in turns))
        trace = {
            "session_id": session_id,
            "ok": not errors,
            "errors": errors,
            "truncated": bool(state.get("is_truncated")) or cut,
            "stopped_by": stopped_by,
            "rewards": rewards,
            "metrics": metrics,
            "turns": len(turns),
        }
        return {"ok": not errors, "errors": errors, "traces": [trace]}

    def _rewards(self, state: Any) -> dict[str, float | None]:
        """The rewards by name; one reward for all where their sum is not what the library says."""
        rubrics = list(rubrics_of(self._environment.rubric, state.get("task")))
        metrics = state.get("metrics") or {}
        named = {
            function.__name__: host_answers.number(metrics[function.__name__] * weight)
            for rubric in rubrics
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
            if weight and function.__name__ in metrics
        }
        total = host_answers.number(state.get("reward"))
        if total is not None and math.isclose(sum(named.values()), total, abs_tol=1e-9) and named:
            return named
        return {"reward": total}


def rubrics_of(rubric: Any, task: str | None = None) -> Iterator[Any]:
    """A rubric and those that it is made of; of a mixture of environments, those of the task alone."""
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from rubrics_of(part, task)
    for name, environment in getattr(rubric, "env_map", {}).items():
        if task is None or name == task:
            yield from rubrics_of(environment.rubric, task)


def heard(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same reward function. The library takes one that raises, or returns no number, for a reward of 0,
    so it is heard here."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            note(error)
            raise
        return wait(result) if inspect.isawaitable(result) else checked(result)

    async def wait(result: Any) -> Any:
        try:
            result = await result
        except Exception as error:
            note(error)
            raise

        return checked(result)

    def checked(result: Any) -> Any:
        try:
            float(result)
        except (TypeError, ValueError) as error:
            note(error)
        return result

    def note(error: Exception) -> None:
        failures.get().append(f"the reward {function.__name__!r}: {type(error).__name__}: {error}")

    return call


def compares(function: Callable[..., Any]) -> bool:
    """Whether the library gives the function all rollouts of a group, which it sees from its parameters."""
    signature = inspect.signature(function)
    plural = {"states", "prompts", "completions", "answers", "tasks", "infos"}
    return bool(plural & set(signature.parameters)) or signature.return_annotation is list
