"""A short crash run: it kills once in every window, and then the audit finds nothing wrong."""

from pathlib import Path

import pytest

from tests.crash.run import crash, plan
from tests.crash.table import table
from tests.crash.windows import WINDOWS

KILLS, SEED = len(WINDOWS), 1


@pytest.mark.long
def test_whatever_dies_nothing_is_lost_and_nothing_is_trained_twice(tmp_path: Path, tiny_model: Path) -> None:
    run = crash(tmp_path, tiny_model, Path(".venv-engine/bin/python"), plan(KILLS, SEED), SEED)
    print(table([run.result]))
    assert run.gave_up is None
    assert len(run.kills) == KILLS
    assert run.report is not None
    assert run.result.findings == ()
    assert run.report.totals.ledger_turns > 50, "the system works between its crashes"
    assert sum(kill.hit for kill in run.kills) >= KILLS * 2 // 3


@pytest.mark.long
def test_the_windows_of_redis_with_a_cluster_of_six_nodes(tmp_path: Path, tiny_model: Path) -> None:
    windows = plan(6, SEED, "redis:", "cluster")
    run = crash(tmp_path, tiny_model, Path(".venv-engine/bin/python"), windows, SEED, redis="cluster")
    print(table([run.result]))
    assert run.result.findings == ()
    assert run.result.answers > 0
    assert any(kill.hit for kill in run.kills)
