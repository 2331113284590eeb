"""The arithmetic of a canary's gates, against other ways to compute the same."""

import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policies.canary_evidence import CanaryEvidence, estimate, outcome, student
from gateway.policies.canary_watch import k3
from rollout_queue.contract.serving_plan import Arm, CanaryCall, CanaryGates, CanaryReport, CanaryScore
from tests.support.tolerances import ulps

VALUES = st.floats(-100, 100)
GATES = CanaryGates(min_groups=3)


@given(st.lists(VALUES, min_size=2, max_size=50))
def test_with_equal_sizes_the_mean_and_its_error_are_the_usual_ones(values: list[float]) -> None:
    found = estimate((value, 1) for value in values)
    slack = ulps(64 * len(values), of=100.0)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=slack)
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert found.error == pytest.approx(error, rel=1e-6, abs=1e-6), "squares lose half of the digits"


def test_groups_count_by_their_size() -> None:
    found = estimate([(10.0, 10), (0.0, 90), (5.0, 0)])
    assert (found.mean, found.groups) == (0.1, 2)
    assert estimate([(2.0, 1), (4.0, 2), (60.0, 30)]).error == 0, "every group has the mean"


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (100, 1.9840)]
)
def test_students_quantile_is_near_the_table(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=0.035)
    assert degrees <= 5 or student(degrees) == pytest.approx(quantile, rel=0.001)


def test_the_estimator_of_the_divergence_is_right_on_average() -> None:
    """Its mean over p is KL(p || q), for two distributions over three tokens."""
    p, q = (0.7, 0.2, 0.1), (0.5, 0.25, 0.25)
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    mean = sum(a * k3(math.log(b / a)) for a, b in zip(p, q, strict=True))
    assert mean == pytest.approx(divergence, rel=1e-12)


@given(st.floats(-1e6, 1e6))
def test_the_estimator_is_finite_and_never_negative(d: float) -> None:
    assert 0 <= k3(d) < math.inf


def play(
    evidence: CanaryEvidence, arm: Arm, group: str, reward: float | None, tokens: int = 10, ok: bool = True
) -> None:
    call = CanaryCall(canary=1, arm=arm, group=group, session=f"{arm}-{group}", tokens=tokens, ok=ok)
    evidence.add(call)
    evidence.session_ended(call.session, reward, None)
    if arm == "canary":
        evidence.add(CanaryScore(canary=1, group=group, tokens=tokens, kl=0.001 * tokens))


def evidence_of(canary: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> CanaryEvidence:
    evidence = CanaryEvidence()
    for index, fields in enumerate(canary):
        play(evidence, "canary", f"c{index}", **fields)
    for index, fields in enumerate(baseline):
        play(evidence, "baseline", f"b{index}", **fields)
    return evidence


def states(evidence: CanaryEvidence) -> dict[str, str]:
    return {each.gate: each.state for each in evidence.report(GATES).readings}


def test_equal_arms_hold_every_gate() -> None:
    groups = [{"reward": value} for value in (0.0, 0.5, 1.0, 0.5)]
    evidence = evidence_of(groups, groups)
    assert states(evidence) == {"kl": "holds", "reward": "holds", "errors": "holds", "length": "holds"}
    report = evidence.report(GATES)
    assert (report.groups, report.baseline_groups) == (4, 4)
    ended = outcome(report, GATES, 1.0)
    assert ended is not None
    assert ended[0] == "promoted"


@pytest.mark.parametrize("tokens", [2, 50])
def test_answers_that_became_much_longer_or_shorter_break_the_gate(tokens: int) -> None:
    evidence = evidence_of(
        [{"reward": 1.0, "tokens": tokens + index} for index in range(5)],
        [{"reward": 1.0, "tokens": 10} for _ in range(5)],
    )
    (length,) = [each for each in evidence.report(GATES).readings if each.gate == "length"]
    assert length.state == "broken"
    assert length.value == pytest.approx((tokens + 2) / 10)
    assert length.value is not None
    assert length.low is not None
    assert length.high is not None
    assert length.low < length.value < length.high


def test_the_interval_of_a_ratio_is_that_of_its_inverse_when_the_arms_change_places() -> None:
    varying = [{"reward": 1.0, "tokens": 20 + index} for index in range(5)]
    steady = [{"reward": 1.0, "tokens": 10} for _ in range(5)]
    one, other = (
        next(each for each in evidence_of(*arms).report(GATES).readings if each.gate == "length")
        for arms in ((varying, steady), (steady, varying))
    )
    assert one.low is not None
    assert one.high is not None
    assert other.low == pytest.approx(1 / one.high)
    assert other.high == pytest.approx(1 / one.low)


def test_a_difference_that_may_be_chance_decides_nothing() -> None:
    evidence = evidence_of(
        [{"reward": value} for value in (0.0, 0.0, 1.0, 0.0)],
        [{"reward": value} for value in (1.0, 0.0, 1.0, 1.0)],
    )
    assert states(evidence)["reward"] == "undecided"
    assert outcome(evidence.report(GATES), GATES, 1.0) is None


def test_two_groups_decide_nothing() -> None:
    evidence = evidence_of([{"reward": 0.0}] * 2, [{"reward": 1.0}] * 2)
    assert set(states(evidence).values()) == {"undecided"}


def test_a_missing_number_never_promotes_and_ends_at_the_deadline() -> None:
    evidence = evidence_of([{"reward": None}] * 5, [{"reward": None}] * 5)
    report = evidence.report(GATES)
    assert states(evidence)["reward"] == "missing"
    assert outcome(report, GATES, 3599.0) is None
    ended = outcome(report, GATES, 3600.0)
    assert ended is not None
    assert ended[0] == "rolled_back"
    assert "reward is missing" in ended[1]


def test_a_group_has_ended_when_all_of_its_sessions_have() -> None:
    evidence = CanaryEvidence()
    for session in ("a", "b"):
        evidence.add(CanaryCall(canary=1, arm="canary", group="g", session=session, tokens=1, ok=True))
    evidence.session_ended("a", 1.0, 3)
    assert evidence.report(GATES).groups == 0
    evidence.session_ended("b", 0.0, 3)
    assert evidence.report(GATES).groups == 0, "the third member is not called yet"
    evidence.add(CanaryCall(canary=1, arm="canary", group="g", session="c", tokens=1, ok=True))
    evidence.session_ended("c", None, 3)
    assert evidence.report(GATES).groups == 1
    assert evidence.arms["canary"]["g"].reward == 0.5


def test_no_numbers_are_no_promotion() -> None:
    assert outcome(CanaryEvidence().report(GATES), GATES, 0.0) is None
    nothing = CanaryGates(
        min_groups=3, max_kl=None, max_reward_drop=None, max_error_increase=None, max_length_change=None
    )
    assert outcome(CanaryReport(groups=2), nothing, 0.0) is None
    assert outcome(CanaryReport(groups=3), nothing, 0.0) == ("promoted", "3 of 3 groups; no gate is set")
