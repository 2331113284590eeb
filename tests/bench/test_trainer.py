"""The trainer's bench runs, and compares like with like."""

from pathlib import Path

import pytest

from bench import trainer
from bench.rollouts import drawn, fewer, tokens
from tests.support.tolerances import ulps


def test_every_contender_has_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "TRL", tmp_path)  # not there: it would take half a minute
    trainer.main(["--smoke", "--rounds", "1", "--rollouts", "16", "--slow-rollouts", "16"])
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split(" | ") for line in lines if line.startswith(("| ours:", "| (a)", "| (b)"))]
    assert len(steps) == 4
    assert len({tuple(cells[1:3]) for cells in steps}) == 1, "each has the same rollouts"
    norms = [float(cells[-1].strip(" |")) for cells in steps]
    # Four decimals are printed of a gradient, and it is a sum over the tokens in one order or another.
    close = 1e-4 + ulps(int(steps[0][2]), of=norms[0])
    assert norms == pytest.approx([norms[0]] * len(norms), abs=close)
    assert "nan times TRL" in lines[-1]


def test_fewer_rollouts_have_the_same_mean_and_the_same_longest() -> None:
    of_64 = drawn(64, 1000, median=190, longest=2048, seed=trainer.SEED)
    of_16 = fewer(of_64, 16)
    assert len(of_16) == 16
    assert max(map(len, of_16)) == max(map(len, of_64))
    # Whole tokens of a seeded draw: nothing is rounded, and 2 % is as close as 16 of 64 lengths come.
    assert tokens(of_16) / 16 == pytest.approx(tokens(of_64) / 64, rel=0.02)
