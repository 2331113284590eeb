"""What a library says of a trace becomes a verdict; what went wrong never becomes a reward."""

from dataclasses import replace
from typing import Any

import pytest

from environments.environment import EpisodeOutcome, NamedReward
from environments.episodes import PlayedTrace, PlayedTraces, outcome_of_trace

SOURCE = "verifiers:sums"
RIGHT = NamedReward("right", 1.0, SOURCE)


def trace(**given: Any) -> PlayedTrace:
    whole: dict[str, Any] = {"session_id": "s", "ok": True, "rewards": {"right": 1.0}, "turns": 2}
    return PlayedTrace(**(whole | given))


def judged(
    *traces: PlayedTrace, ok: bool = True, errors: tuple[str, ...] = (), graded_elsewhere: bool = False
) -> EpisodeOutcome:
    played = PlayedTraces(ok=ok, errors=errors, traces=traces)
    return outcome_of_trace(played, "s", True, SOURCE, graded_elsewhere)


def test_an_episode_that_is_whole_is_completed_with_each_reward_by_its_name() -> None:
    found = judged(trace(rewards={"right": 1.0, "brief": -0.25}, metrics={"length": 3.0}))
    assert found == EpisodeOutcome(
        "completed", turns=2, metrics={"length": 3.0}, named=(RIGHT, NamedReward("brief", -0.25, SOURCE))
    )
    assert found.reward == 0.75


def test_a_truncated_trace_keeps_its_rewards() -> None:
    found = judged(trace(truncated=True, stopped_by="max_turns"))
    assert found == EpisodeOutcome("truncated", reason="max_turns", turns=2, named=(RIGHT,))


@pytest.mark.parametrize(
    ("played", "more", "reason"),
    [
        (
            trace(ok=False, errors=("ProviderError: 502", "HarnessError: 1")),
            {"ok": False},
            "ProviderError: 502",
        ),
        (trace(late=True, stopped_by="scoring_timeout"), {}, "scoring_timeout"),
        (trace(rewards={"right": 1.0, "judge": None}), {}, "scoring did not run: judge"),
        (trace(rewards={}), {}, "the environment gave no reward"),
        (trace(trained=False), {}, "does not train the agent 'agent'"),
        (trace(), {"ok": False, "errors": ("EnvError: finalize()",)}, "EnvError: finalize()"),
        (trace(session_id="other"), {}, "the agent did not play"),
    ],
)
def test_what_went_wrong_has_failed_without_a_reward(
    played: PlayedTrace, more: dict[str, Any], reason: str
) -> None:
    found = judged(played, **more)
    assert found.status == "failed"
    assert found.reward is None
    assert reason in (found.reason or "")


def test_a_trace_fails_with_another_one_of_its_episode() -> None:
    found = judged(trace(), trace(session_id="other", ok=False, errors=("SandboxError: gone",)), ok=False)
    assert (found.status, found.reward) == ("failed", None)
    assert found.reason == "the episode failed: SandboxError: gone"


def test_an_episode_without_a_reward_may_be_graded_elsewhere() -> None:
    assert judged(trace(rewards={}), graded_elsewhere=True) == EpisodeOutcome("completed", turns=2)


def test_rewards_of_zero_are_rewards() -> None:
    found = judged(trace(rewards={"right": 0.0}))
    assert found == EpisodeOutcome("completed", turns=2, named=(replace(RIGHT, value=0.0),))
