"""Runs of the crash matrix can be added up."""

from pathlib import Path

import pytest

from tests.crash import table
from tests.crash.result import Kill, Result, write
from tests.crash.windows import WINDOWS

GATEWAY, ENGINE = "gateway: turns in flight", "engine: sampling"


def test_results_of_several_runs_make_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = (
        Result(7, (Kill(ENGINE, True, 9.0, 20), Kill(GATEWAY, True, 2.0, 30)), 60, ()),
        Result(12, (Kill(GATEWAY, False, 4.0, 5), Kill("gone: since", True, 1.0, 0)), 10, ("lost: a turn",)),
    )
    paths = [tmp_path / f"{run.seed}.json" for run in runs]
    for run, path in zip(runs, paths, strict=True):
        write(run, path)
    monkeypatch.setattr("sys.argv", ["table", *(str(path) for path in paths)])
    table.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == list(table.HEAD)
    assert rows[2:] == [
        [GATEWAY, "2", "1", "1", "3.0", "35", "", "7, 12"],
        [ENGINE, "1", "1", "0", "9.0", "20", "", "7"],
        ["gone: since", "1", "1", "0", "1.0", "0", "", "12"],
        ["all", "4", "3", "1", "", "70", "1", "7, 12"],
    ]


def test_the_reliability_page_names_every_window() -> None:
    page = (Path(__file__).parents[3] / "docs/reliability.md").read_text(encoding="utf-8")
    rows = {tuple(line.strip("| ").split(" | ")[:2]) for line in page.splitlines() if line.startswith("| ")}
    assert {(window.victim, window.name) for window in WINDOWS} <= rows
