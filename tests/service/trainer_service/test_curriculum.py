"""The curriculum: groups of tasks that the policy sometimes solves are trained before the others."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.http.keys import Keyring
from tests.support.tolerances import FLOAT64, ulps
from tests.support.trainer_service.harness import Harness, MakeHarness
from trainer_service.algorithms.curriculum import CurriculumSettings
from trainer_service.app import create_app
from trainer_service.groups.task_rates import TaskRate, TaskRates, lot

MEMORY = 8
FLOOR = 4 * (MEMORY + 1) / (MEMORY + 2) ** 2
"""The weight of a task whose last rollouts, more than it remembers, all passed: p = (8 + 1) / (8 + 2)."""


def with_curriculum(make_harness: MakeHarness, **algorithm: Any) -> Harness:
    return make_harness(algorithm={"curriculum": {"memory": MEMORY}, **algorithm}).start()


def play(harness: Harness, task: str, *rewards: float) -> None:
    """Rollouts of a task in one group; a group of equal rewards ends without a step."""
    harness.agents.group(f"{task}-{len(harness.stream.heads)}", rewards, task_id=task)


def tasks(harness: Harness) -> list[dict[str, Any]]:
    app = create_app(
        harness.shared_state,
        harness.checkpoints.ledger,
        harness.store,
        Keyring(["c"], ["a"]),
        harness.registry,
    )
    client = TestClient(app, headers={"x-api-key": "a"})
    page = client.get("/tasks", params={"limit": 2}).json()
    found: list[dict[str, Any]] = page["data"]
    while page["next_cursor"]:
        page = client.get("/tasks", params={"limit": 2, "cursor": page["next_cursor"]}).json()
        found += page["data"]
    return found


def test_groups_of_solved_and_of_hopeless_tasks_come_after_the_others(make_harness: MakeHarness) -> None:
    algorithm = {"curriculum": {"memory": 32}, "max_rows": 2, "max_staleness": 100}
    harness = make_harness(algorithm=algorithm).start()
    for _ in range(3):
        play(harness, "solved", *[1.0] * 32)
        play(harness, "hopeless", *[0.0] * 32)
        play(harness, "open", *[1.0, 0.0] * 16)
        assert harness.trainer.run_once()
    weights = {rate["task_id"]: rate["weight"] for rate in tasks(harness)}
    assert weights["solved"] == pytest.approx(weights["hopeless"], rel=1e-9)
    assert weights["solved"] < 0.13 < 0.99 < weights["open"], "4 · 33 · 1 / 34², and nearly 4 / 2²"
    for place in range(10):
        harness.agents.group(f"open{place}", [1.0, 0.0], task_id="open", at=200.0 + place)
        harness.agents.group(f"solved{place}", [1.0, 0.9], task_id="solved", at=300.0 + place)
        harness.agents.group(f"hopeless{place}", [0.1, 0.0], task_id="hopeless", at=300.0 + place)
    trained = []
    while harness.trainer.run_once():
        trained.append(harness.checkpoints.ledger(0, 1000)[-1].sessions[0].rstrip("-0123456789"))
    assert len(trained) == 30, "in the end all are trained"
    # Of the 20 others, which are newer, 2.6 are preferred in the mean.
    assert trained[:16].count("open") == 10


def test_the_weights_of_tasks_are_shown(make_harness: MakeHarness) -> None:
    harness = with_curriculum(make_harness)
    play(harness, "solved", 1.0, 1.0)
    play(harness, "hopeless", 0.0, 0.0)
    play(harness, "open", 1.0, 0.0)
    harness.agents.group("nameless", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert {row["task_id"]: (row["pass_rate"], row["weight"]) for row in tasks(harness)} == {
        "hopeless": (pytest.approx(1 / 3.875, rel=1e-9), pytest.approx(4 * 2.875 / 3.875**2, rel=1e-9)),
        "open": (pytest.approx(1.875 / 3.875, rel=1e-9), pytest.approx(4 * 1.875 * 2 / 3.875**2, rel=1e-9)),
        "solved": (pytest.approx(2.875 / 3.875, rel=1e-9), pytest.approx(4 * 2.875 / 3.875**2, rel=1e-9)),
    }


def test_a_checkpoint_keeps_the_rates_of_tasks(make_harness: MakeHarness) -> None:
    harness = with_curriculum(make_harness)
    play(harness, "solved", *[1.0] * 4)
    play(harness, "open", 1.0, 0.0)
    assert harness.trainer.run_once()
    before = tasks(harness)
    assert len(before) == 2
    assert tasks(harness.restart()) == before


def test_without_a_curriculum_no_rate_is_kept(harness: Harness) -> None:
    play(harness, "open", 1.0, 0.0)
    assert harness.trainer.run_once()
    assert tasks(harness) == []


def test_the_tasks_that_ended_longest_ago_are_forgotten(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.groups.task_rates.TASKS_KEPT", 2)
    harness = with_curriculum(make_harness)
    for task in ("a", "b", "a", "c"):
        play(harness, task, 1.0, 1.0)
        harness.trainer.run_once()
    assert [row["task_id"] for row in tasks(harness)] == ["a", "c"]


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 64))
def test_no_history_makes_a_weight_zero(passes: list[bool], memory: int) -> None:
    rate = TaskRate("t")
    for passed in passes:
        rate = rate.plus(passed, memory)
    lowest = 4 * (memory + 1) / (memory + 2) ** 2
    assert lowest - ulps(len(passes) + 8, of=1.0, unit=FLOAT64) <= rate.weight <= 1.0
    assert rate.rollouts <= memory + ulps(len(passes) + 8, of=memory, unit=FLOAT64)


def test_as_many_groups_are_preferred_as_the_weight_says() -> None:
    number = 4000
    rates = TaskRates(CurriculumSettings(memory=MEMORY), [TaskRate("t", MEMORY, MEMORY)])
    preferred = sum(lot(f"session-{each}") < rates.weight("t") for each in range(number))
    deviation = (FLOOR * (1 - FLOOR) / number) ** 0.5
    assert abs(preferred / number - FLOOR) < 5 * deviation
