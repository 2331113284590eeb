"""Tokens that are too old are dropped, masked, corrected or waited for, by configuration."""

from collections import Counter
from typing import Any

import pytest

from rollout_queue.contract.records import Span
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from trainer_service.algorithms.settings import AlgorithmSettings

GENTLE = {"lr": 1e-3, "warmup_steps": 0}


def aged(make_harness: MakeHarness, stale: str, **algorithm: Any) -> Harness:
    """A trainer at version 5 that takes tokens of versions 3 and newer."""
    given = {"stale": stale, "max_staleness": 2} | algorithm
    return make_harness(stale, algorithm=given, initial_version=5, optimizer=GENTLE).start()


def episode(harness: Harness, session_id: str, value: float, versions: list[int]) -> None:
    """One turn of a group of two; one token by each version."""
    harness.agents.open(session_id, "g", 2)
    spans = tuple(Span(version, place, place + 1) for place, version in enumerate(versions))
    output = [10 + place for place in range(len(versions))]
    harness.agents.call(turn(session_id, f"{session_id}-t", output_ids=output, versions=spans))
    harness.agents.finish(session_id, value)


def test_one_old_token_drops_its_rollout(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "drop")
    episode(harness, "a", 1.0, [2, 5, 5])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert not harness.trainer.run_once()
    assert harness.session_codes() == {"a": "stale", "b": "zero_advantage"}


def test_masked_tokens_are_not_trained_and_newer_ones_are(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "mask")
    episode(harness, "a", 1.0, [2, 2, 5])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert harness.trainer.run_once()
    metrics = harness.shared_state.snapshot.metrics
    assert metrics["staleness/masked_frac"] == pytest.approx(2 / 6)
    assert metrics["is/masked_frac"] == pytest.approx(2 / 6)
    assert harness.session_codes() == {"a": "trained", "b": "trained"}


def test_a_rollout_of_which_every_token_is_masked_is_stale(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "mask")
    episode(harness, "a", 1.0, [2, 1, 2])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert not harness.trainer.run_once()
    assert harness.session_codes()["a"] == "stale"


def test_corrected_tokens_are_trained_however_old(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "correct")
    episode(harness, "a", 1.0, [1, 1, 1])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert harness.trainer.run_once()
    assert harness.shared_state.snapshot.metrics["staleness/total_max"] == 4.0
    assert harness.shared_state.snapshot.metrics["staleness/masked_frac"] == 0.0


def test_a_step_waits_for_the_rollouts_that_it_would_make_too_old(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "wait")
    harness.agents.open("late", "late", 2)
    harness.agents.call(turn("late", "late-t", output_ids=[10, 11], version=3))
    episode(harness, "a", 1.0, [5])
    episode(harness, "b", 0.0, [5])
    assert not harness.trainer.run_once()
    assert harness.shared_state.snapshot.waiting_for.startswith(
        "1 unfinished sessions, which the next step would make"
    )
    harness.agents.finish("late", 1.0)
    harness.agents.episode("later", 0.0, group_id="late", size=2, version=5, output_ids=[12, 1])
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_rollout_that_stays_young_enough_delays_no_step(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "wait")
    harness.agents.open("late", "late", 2)
    harness.agents.call(turn("late", "late-t", output_ids=[10, 11], version=4))
    episode(harness, "a", 1.0, [5])
    episode(harness, "b", 0.0, [5])
    assert harness.trainer.run_once()


def test_a_step_does_not_wait_if_waiting_cannot_help(make_harness: MakeHarness) -> None:
    """One session is too old already, one is an evaluation, and one has no reward and may never get one."""
    harness = aged(make_harness, "wait")
    for name, version, policy in (("old", 2, "policy"), ("exam", 3, "policy@3"), ("poor", 3, "policy")):
        harness.agents.open(name, name, 2)
        harness.agents.call(turn(name, f"{name}-t", output_ids=[10, 11], version=version, policy=policy))
    harness.agents.finish("poor")
    episode(harness, "a", 1.0, [5])
    episode(harness, "b", 0.0, [5])
    assert harness.trainer.run_once()


def test_a_masked_outlier_does_not_drop_newer_tokens_of_its_row(make_harness: MakeHarness) -> None:
    """The masked token is an outlier, for which the mask of outliers would drop the whole row."""
    harness = aged(make_harness, "mask", masks=[{"name": "outlier", "low": 1e-4, "high": 100.0}])
    harness.agents.open("a", "g", 2)
    spans = (Span(1, 0, 1), Span(5, 1, 3))
    harness.agents.call(
        turn("a", "a-t", output_ids=[10, 11, 12], versions=spans, logprobs=[-60.0, -4.0, -4.0])
    )
    harness.agents.finish("a", 1.0)
    episode(harness, "b", 0.0, [5, 5, 5])
    assert harness.trainer.run_once()
    assert harness.shared_state.snapshot.metrics["is/masked_frac"] == pytest.approx(1 / 6)


def test_without_staleness_training_is_synchronous(make_harness: MakeHarness) -> None:
    """No step is made while a session with tokens of the current version is open."""
    harness = aged(make_harness, "wait", max_staleness=0)
    harness.agents.open("late", "late", 1)
    harness.agents.call(turn("late", "late-t", output_ids=[10, 11], version=5))
    episode(harness, "a", 1.0, [5])
    episode(harness, "b", 0.0, [5])
    assert not harness.trainer.run_once()
    harness.agents.finish("late", status="failed")
    assert harness.trainer.run_once()


@pytest.mark.parametrize(
    ("measured", "mode"),
    [
        ({}, "correct"),
        ({"mismatch/ess": 0.9, "mismatch/k3": 0.01}, "correct"),
        ({"mismatch/ess": 0.4, "mismatch/k3": 0.01}, "mask"),
        ({"mismatch/ess": 0.9, "mismatch/k3": 0.2}, "mask"),
    ],
)
def test_auto_corrects_while_the_last_step_measured_well(measured: dict[str, float], mode: str) -> None:
    assert AlgorithmSettings(stale="auto").after(measured).stale == mode


def test_auto_masks_after_a_step_that_measured_badly(make_harness: MakeHarness) -> None:
    harness = aged(make_harness, "auto", auto_min_ess=0.99, auto_max_kl=100.0)
    episode(harness, "a", 1.0, [1, 1, 1])
    episode(harness, "b", 0.0, [5, 5, 5])
    assert harness.trainer.run_once()
    assert harness.shared_state.snapshot.metrics["mismatch/ess"] < 0.99
    for name, versions in (("c", [1, 1]), ("d", [6, 6])):
        harness.agents.open(name, "h", 2)
        spans = tuple(Span(version, place, place + 1) for place, version in enumerate(versions))
        harness.agents.call(turn(name, f"{name}-t", output_ids=[20, 21], versions=spans))
        harness.agents.finish(name, float(name == "c"))
    assert not harness.trainer.run_once()
    assert harness.session_codes()["c"] == "stale"


def test_nothing_is_corrected_where_no_correction_is_set() -> None:
    with pytest.raises(ValueError, match="set a correction, or a loss with anchor: rollout"):
        AlgorithmSettings.model_validate({"stale": "correct", "correction": "none"})


@pytest.mark.parametrize(("intake", "ages"), [("newest", [0] * 9), ("oldest", [0, 1, 1, 2, 2, 2, 2, 2, 2])])
def test_with_twice_the_traffic_that_can_be_trained_the_newest_rollouts_are(
    make_harness: MakeHarness, intake: str, ages: list[int]
) -> None:
    most = 2
    bounds = {"intake": intake, "max_staleness": most, "min_live_rows": 2, "max_rows": 2}
    harness = make_harness(algorithm=bounds).start()
    found = []
    for number in range(9):
        for half in (0, 1):
            versions = (Span(harness.trainer.version, 0, 3),)
            at = 100.0 + 2 * number + half
            harness.agents.group(f"g{number}-{half}", [1.0, 0.0], versions=versions, at=at)
        assert harness.trainer.run_once()
        found.append(harness.shared_state.snapshot.metrics["staleness/total_max"])
    assert found == ages
    codes = Counter(harness.session_codes().values())
    lost = "skipped_for_newer" if intake == "newest" else "stale"
    assert codes["trained"] == 2 * 9
    assert codes.keys() == {"trained", lost, None}
    assert codes[None] <= 2 * 2 * (most + 1)


def test_a_group_that_was_passed_over_is_trained_if_nothing_newer_is_there(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"min_live_rows": 2, "max_rows": 2}).start()
    for name, at in (("a", 101.0), ("b", 102.0)):
        harness.agents.group(name, [1.0, 0.0], at=at)
    assert harness.trainer.run_once()
    assert harness.session_codes() | {"a-0": None} == harness.session_codes()
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}
