"""The trainer's bench runs, and all contenders train the same rollouts."""

from pathlib import Path

import pytest

from bench import trainer
from bench.rollouts import drawn, fewer, group, sessions, small, tokens
from bench.workloads import SEED, WORKLOADS
from tests.support.tolerances import ulps


def test_every_contender_of_a_workload_has_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "TRL", tmp_path)  # leaves TRL out, which would take half a minute
    trainer.main(["--smoke", "--rounds", "1", "--rollouts", "8", "--slow-rollouts", "8"])
    out = capsys.readouterr().out
    for name, workload in WORKLOADS.items():
        table = out.split(f"\n{name}: {workload.what}\n\n")[1].split("\n\n")[0].splitlines()
        steps = [line.split(" | ") for line in table if line.startswith(("| ours:", "| (a)", "| (b)"))]
        assert len(steps) == len(workload.contenders) - 1, name
        assert len({tuple(cells[1:3]) for cells in steps}) == 1, f"{name}: each has the same rollouts"
        norms = [float(cells[-1].strip(" |")) for cells in steps]
        # The norm is printed with four decimals. It sums over all tokens, in an order that may differ.
        close = 1e-4 + ulps(int(steps[0][2]), of=norms[0])
        assert norms == pytest.approx([norms[0]] * len(norms), abs=close), name
    targets = out.split("| | ours, of (a) | target | ours, of TRL |")[1].splitlines()
    named = [line.split(" | ") for line in targets if line.endswith(" | nan |")]
    assert [(cells[0].strip("| "), float(cells[2])) for cells in named] == [
        (name, workload.target) for name, workload in WORKLOADS.items()
    ]


def test_fewer_rollouts_have_the_same_mean_and_the_same_longest() -> None:
    of_64 = drawn(64, 1000, median=190, longest=2048, seed=SEED)
    of_16 = fewer(of_64, 16)
    assert len(of_16) == 16
    assert max(map(len, of_16)) == max(map(len, of_64))
    # The lengths are a seeded draw of integers, so that nothing is rounded. 16 of 64 come within 2 %.
    assert tokens(of_16) / 16 == pytest.approx(tokens(of_64) / 64, rel=0.02)


def test_a_session_is_as_long_as_asked_and_trains_only_its_answers() -> None:
    for session in sessions(2, 1000, length=103, turns=4, answer=5, seed=SEED):
        assert len(session) == 103
        assert len(session.trained) == len(session.completion)
        assert sum(session.trained) == 4 * 5
        assert session.trained[:5] == [1] * 5, "the prompt ends where the first answer begins"
        assert sum(small([session])[0].trained) == 4, (
            "a small step trains all that it keeps of the completion"
        )


def test_a_group_has_one_prompt_and_answers_that_differ() -> None:
    rollouts = group(3, 1000, prompt=40, answer=8, seed=SEED)
    assert len({tuple(rollout.prompt) for rollout in rollouts}) == 1
    assert len({tuple(rollout.completion) for rollout in rollouts}) == 3
    assert {len(rollout) for rollout in rollouts} == {48}
