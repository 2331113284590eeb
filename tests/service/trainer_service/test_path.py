"""The path of a training step is short: files and functions of the product that it meets."""

import sys
from pathlib import Path

import yaml

from bench.house import Trace
from tests.support.trainer_service.harness import Harness

BUDGETS = Path(__file__).parents[2] / "house" / "budgets.yaml"


def test_a_training_step_stays_in_its_budget(harness: Harness) -> None:
    """The second step, with its checkpoint and its version."""
    budget = yaml.safe_load(BUDGETS.read_text(encoding="utf-8"))["step"]
    harness.step("warm")
    harness.agents.group("traced", [1.0, 0.0])
    trace = Trace(on=True)
    sys.setprofile(trace)
    try:
        assert harness.trainer.run_once()
    finally:
        sys.setprofile(None)
    for path, calls in trace.files().most_common():
        print(f"{calls:5} {path}")
    found = {"files": len(trace.files()), "functions": len(trace.calls)}
    print(found)
    assert all(found[name] <= budget[name] for name in budget), found
