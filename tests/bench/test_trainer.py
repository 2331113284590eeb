"""The trainer's bench runs, and all contenders train the same rollouts."""

from pathlib import Path

import pytest

from bench import trainer
from bench.rollouts import drawn, fewer, tokens
from tests.support.tolerances import ulps


def test_every_contender_has_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "TRL", tmp_path)  # leaves TRL out, which would take half a minute
    trainer.main(["--smoke", "--rounds", "1", "--rollouts", "16", "--slow-rollouts", "16"])
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split(" | ") for line in lines if line.startswith(("| ours:", "| (a)", "| (b)"))]
    assert len(steps) == 4
    assert len({tuple(cells[1:3]) for cells in steps}) == 1, "each has the same rollouts"
    norms = [float(cells[-1].strip(" |")) for cells in steps]
    # The norm is printed with four decimals. It sums over all tokens, in an order that may differ.
    close = 1e-4 + ulps(int(steps[0][2]), of=norms[0])
    assert norms == pytest.approx([norms[0]] * len(norms), abs=close)
    assert "nan times TRL" in lines[-1]


def test_fewer_rollouts_have_the_same_mean_and_the_same_longest() -> None:
    of_64 = drawn(64, 1000, median=190, longest=2048, seed=trainer.SEED)
    of_16 = fewer(of_64, 16)
    assert len(of_16) == 16
    assert max(map(len, of_16)) == max(map(len, of_64))
    # The lengths are a seeded draw of integers, so that nothing is rounded. 16 of 64 come within 2 %.
    assert tokens(of_16) / 16 == pytest.approx(tokens(of_64) / 64, rel=0.02)
