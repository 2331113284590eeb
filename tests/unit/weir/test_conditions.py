"""The conditions that operators are told of are those of the alert rules, with the same bounds."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_queue.protocol.conditions import (
    CONDITIONS,
    DISK_LEAST_FREE_BYTES,
    NOTHING_TRAINED_S,
    TRAINER_SILENT_S,
    Condition,
    ConditionFacts,
    problems_in,
)
from rollout_queue.protocol.trainer_messages import DiskRoom, TrainerReport

RULES = Path(__file__).parents[3] / "deploy/observe/prometheus/rules.yml"
SEVERITIES = {"error": {"critical"}, "warning": {"warning", "critical"}}
"""An alert may be more urgent than the condition: it has held for some time."""


def rule(alert: str) -> Any:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return next(each for group in groups for each in group["rules"] if each["alert"] == alert)


@pytest.mark.parametrize("condition", [each for each in CONDITIONS if each.alert], ids=lambda each: each.code)
def test_an_alert_has_the_bound_and_the_severity_of_its_condition(condition: Condition) -> None:
    assert condition.alert is not None
    found = rule(condition.alert)
    assert condition.alert_bound in found["expr"]
    assert found["labels"]["severity"] in SEVERITIES[condition.severity]


def test_the_alert_that_nothing_is_trained_has_the_time_of_the_warning() -> None:
    assert f"[{NOTHING_TRAINED_S / 60:g}m]" in rule("WeirNothingTrained")["expr"]


def codes(**report: Any) -> list[str]:
    facts = ConditionFacts(now=1000.0, trainer=TrainerReport(**report))
    return [problem.check for problem in problems_in(facts)]


def test_a_silent_trainer_is_not_also_paused() -> None:
    assert codes() == ["trainer_missing"]
    assert codes(last_seen=1000 - TRAINER_SILENT_S, state="paused") == ["trainer_paused"]
    assert codes(last_seen=999 - TRAINER_SILENT_S, state="paused") == ["trainer_silent"]
    assert codes(last_seen=999.0, state="training") == []


@pytest.mark.parametrize(
    ("free", "total", "full"),
    [
        (DISK_LEAST_FREE_BYTES - 1, 10 * 2**30, True),
        (DISK_LEAST_FREE_BYTES, 10 * 2**30, False),
        (5 * 2**30 - 1, 100 * 2**30, True),
        (5 * 2**30, 100 * 2**30, False),
    ],
)
def test_a_disk_with_less_than_2_gib_or_5_percent_free_is_nearly_full(
    free: int, total: int, *, full: bool
) -> None:
    disk = DiskRoom(free_bytes=free, total_bytes=total)
    assert codes(last_seen=999.0, state="training", disk=disk) == ["disk_nearly_full"] * full


def test_a_disk_that_is_full_already_is_not_also_nearly_full() -> None:
    disk = DiskRoom(free_bytes=0, total_bytes=2**30)
    assert codes(last_seen=999.0, waiting_for="room on the disk for version 1", disk=disk) == [
        "trainer_lacks_room"
    ]
    assert codes(last_seen=999 - TRAINER_SILENT_S, disk=disk) == ["trainer_silent"]
