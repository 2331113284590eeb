"""The benches of whole runs: each trial runs once, and its stored result becomes a line of a table."""

import math
from pathlib import Path
from random import Random
from statistics import fmean

import msgspec
import pytest

from bench import asynchrony, learning, trial
from bench.results import Progress, Result, ResultFolder, Trial
from bench.tasks import LONGEST_S, TASKS, takes_s
from bench.trial import Bounds, TrialCourse
from gateway.settings import LimitSettings
from rollout_queue.protocol.trainer_messages import TrainerReport
from tests.support.system_status import system_status
from trainer_service.algorithms.settings import AlgorithmSettings
from weir.demo.demo_episodes import WINDOW, EpisodeLog
from weir.demo.observer import Observation
from weir.errors import StackError


def made(trial: Trial, **changes: object) -> Result:
    """A run that reached the target after 1,000 episodes in a quarter of an hour."""
    mark = Progress(900.0, 1000, 30)
    given = {
        "trial": trial,
        "ended": "reward 0.9 after 900 s",
        "reached": mark,
        "whole": mark,
        "reward_warm": 0.25,
        "reward_last": 0.91,
        "reward_final": 0.95,
        "staleness_mean": 1.5,
        "staleness_max": 3.0,
        "abs_logp": 0.001,
        "trains": 0.5,
        "publishes": 0.125,
        "engine_idle": 0.25,
        "engine_running": 12.0,
        "failures": 0,
        "verdicts": {"stale": 4},
        "seconds": {"start": 30.0},
        "load": 1.0,
        "curve": [(128, 60.0, 0.3), (1000, 900.0, 0.91)],
    }
    return msgspec.convert(given | changes, Result)


class Runs:
    """Stands for the real stack and notes which trials it is asked to run."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: set[str] = set()

    def __call__(self, trial: Trial, bounds: Bounds, folder: Path, models: Path) -> Result:
        self.asked.append(trial.name)
        if trial.name in self.broken:
            raise StackError("redis has ended")
        return made(trial)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    stand_in = Runs()
    monkeypatch.setattr(trial, "run", stand_in)
    return stand_in


def test_a_second_invocation_runs_what_is_missing(runs: Runs, tmp_path: Path) -> None:
    few = ["--results", str(tmp_path), "--staleness", "0", "4", "--seeds"]
    learning.main([*few, "0"])
    assert runs.asked == ["tool-staleness0-seed0", "tool-staleness4-seed0"]
    learning.main([*few, "0", "1"])
    assert runs.asked[2:] == ["tool-staleness0-seed1", "tool-staleness4-seed1"]
    learning.main([*few, "0", "1"])
    learning.main([*few, "7", "--table"])
    assert len(runs.asked) == 4


def test_what_acceptance_asks_for_is_the_default(runs: Runs, tmp_path: Path) -> None:
    learning.main(["--results", str(tmp_path / "learning")])
    assert len(set(runs.asked)) == 20
    learning.main(["--results", str(tmp_path / "learning"), "--task", "guess"])
    assert len(set(runs.asked)) == 23
    asynchrony.main(["--results", str(tmp_path / "asynchrony")])
    assert set(runs.asked[23:]) == {f"slow-staleness{n}-seed{seed}" for n in (0, 4) for seed in (0, 1, 2)}


def test_a_run_that_fails_costs_no_other_and_is_tried_again(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.broken = {"tool-staleness2-seed0"}
    few = ["--results", str(tmp_path), "--staleness", "2", "4", "--seeds", "0"]
    with pytest.raises(SystemExit, match="1 runs failed"):
        learning.main(few)
    assert "tool-staleness2-seed0 failed: redis has ended" in capsys.readouterr().err
    assert [path.stem for path in tmp_path.glob("*.json")] == ["tool-staleness4-seed0"]
    runs.broken = set()
    learning.main(few)
    assert runs.asked[2:] == ["tool-staleness2-seed0"]


def test_a_broken_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "tool-staleness0-seed0.json").write_text('{"trial": 3}')
    with pytest.raises(SystemExit, match=r"tool-staleness0-seed0\.json is no result: .*delete it"):
        learning.main(["--results", str(tmp_path), "--table"])


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_the_table_of_learning_is_made_from_the_files(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--results", str(tmp_path), "--staleness", "4", "--seeds", "0"]
    learning.main(few)
    never = made(Trial("tool", 4, 1), reached=None, reward_last=None, reward_final=0.4)
    ResultFolder(tmp_path).put(never)
    capsys.readouterr()
    plot = tmp_path / "docs" / "learning.png"
    learning.main(["--results", str(tmp_path), "--table", "--plot", str(plot)])
    said = capsys.readouterr().out
    assert rows(said)[2:] == [
        ["tool", "4", "0", "30", "1000", "900", "0.25", "0.91", "0.95", "1.50", "3", "4"],
        ["tool", "4", "1", "30", "1000", "never", "0.25", "-", "0.40", "1.50", "3", "4"],
    ]
    assert "staleness ≤ 4: 1 of 2 seeds reach the target; the smallest gain of a seed is 15 points" in said
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_asynchrony_is_told_against_the_synchronous_run_of_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = ResultFolder(tmp_path)
    for seed, seconds in ((0, 300.0), (1, 450.0)):
        shelf.put(made(Trial("slow", 0, seed)))
        shelf.put(made(Trial("slow", 4, seed), whole=Progress(seconds, 1000, 30)))
    shelf.put(made(Trial("slow", 4, 2)))
    shelf.put(made(Trial("slow", 8, 0), whole=Progress(225.0, 1000, 30)))
    asynchrony.main(["--results", str(tmp_path), "--table"])
    said = capsys.readouterr().out
    first = ["0", "0", "4000", "900", "0.91", "0.95", "50%", "12%", "38%", "25%", "12.0", "1.50", "3"]
    assert rows(said)[2] == first
    assert len(rows(said)) == 2 + 6
    assert "≤ 4, times the synchronous episodes per hour: 3.00 (seed 0), 2.00 (seed 1); 2.50 in the" in said
    assert "≤ 8, times the synchronous episodes per hour: 4.00 (seed 0); 4.00 in the mean" in said


def test_staleness_is_bound_at_the_trainer_and_before_it(tmp_path: Path) -> None:
    for versions, stale in ((0, "wait"), (8, "drop")):
        settings = trial.settings_of(Trial("guess", versions, 3), tmp_path, tmp_path)
        algorithm = AlgorithmSettings.model_validate(settings.services["trainer"]["algorithm"])
        assert (algorithm.max_staleness, algorithm.stale) == (versions, stale)
        assert algorithm.min_live_rows == trial.GROUP_SIZE * trial.GROUPS_PER_STEP
        limits = LimitSettings.model_validate(settings.services["gateway"]["limits"])
        assert limits.staleness_versions == versions
        assert settings.services["trainer"]["seed"] == 3
    assert [trial.groups_in_flight(versions) for versions in (0, 2, 8)] == [8, 12, 36]


def course(**state: str) -> TrialCourse:
    page = system_status(trainer=TrainerReport.model_validate(state))
    return TrialCourse(Bounds(episodes=10 * WINDOW, seconds=3600), Observation(status=page))


def filled(*rewards: float) -> EpisodeLog:
    record = EpisodeLog()
    for reward in rewards:
        for _ in range(WINDOW):
            record.add(reward, None)
    return record


def test_a_run_ends_at_the_target_and_stays_ended() -> None:
    going = course()
    assert not going.has_ended(filled(0.2, 0.8))
    assert going.has_ended(filled(0.2, 0.8, 0.95))
    assert going.reached is going.whole is not None
    assert going.whole.episodes == 3 * WINDOW
    first = going.whole
    assert going.has_ended(filled(0.2))
    assert going.whole is first
    assert [(episodes, reward) for episodes, _, reward in going.curve] == [(256, 0.8), (384, 0.95)]


def test_a_run_that_never_learns_says_what_ended_it() -> None:
    bound = course()
    assert bound.has_ended(filled(*[0.5] * 10))
    assert (bound.reached, bound.ended) == (None, "no reward of 0.9 within 1280 episodes")
    held = course(state="paused", waiting_for="POST /resume, since the reward fell")
    assert held.has_ended(filled(0.5))
    assert held.ended == "the trainer paused itself: POST /resume, since the reward fell"


def test_slow_tools_take_the_same_times_in_each_run_of_a_seed() -> None:
    game = TASKS["slow"].game
    assert game.group(Random(3), 8) == game.group(Random(3), 8)
    (task, times), (other, other_times) = game.group(Random(3), 2)
    assert task == other
    assert times != other_times
    random = Random(0)
    drawn = sorted(takes_s(random) for _ in range(20_000))
    # Five standard errors. That of the mean is √(e - 1) / √n, that of the median √(π / 2) · e^-0.5 / √n.
    close = [5 * each / math.sqrt(len(drawn)) for each in (1.31, 0.76)]
    assert fmean(drawn) == pytest.approx(1.0, abs=close[0])
    assert drawn[10_000] == pytest.approx(math.exp(-0.5), abs=close[1])
    assert drawn[-1] == LONGEST_S
