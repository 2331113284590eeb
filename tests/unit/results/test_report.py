"""The page of results says what the files of figures say."""

from pathlib import Path

import msgspec
import pytest

from results.experiments import EXPERIMENTS
from results.figures import CurvePoint, Judged, Spent, TrialResult
from results.report import HERE, readme, results_of


def result(variant: str, seed: int, *, reached: bool) -> TrialResult:
    return TrialResult(
        experiment="countdown",
        variant=variant,
        seed=seed,
        before=Judged(0.1, 0.05, 0.15),
        after=Judged(0.5, 0.45, 0.55),
        versions=50,
        curve=[
            CurvePoint(0.9 if reached else 0.1, Spent(1000, 20.0, 40.0)),
            CurvePoint(0.1, Spent(3072, 60.0, 120.0)),
        ],
        load=1.0,
    )


def test_the_page_in_the_repository_is_that_of_its_data() -> None:
    assert (HERE / "README.md").read_text(encoding="utf-8") == readme()


def test_each_experiment_has_three_seeds_of_each_variant_and_a_picture() -> None:
    for name, experiment in EXPERIMENTS.items():
        known = [*experiment.variants, *(["trl"] if experiment.in_trl else [])]
        found = [(each.variant, each.seed) for each in results_of(name, HERE / "data")]
        assert found == [(variant, seed) for variant in known for seed in (0, 1, 2)], name
        assert (HERE / f"{name}.png").exists()


def test_a_run_that_missed_the_target_is_told(tmp_path: Path) -> None:
    for each in (result("async", 0, reached=True), result("async", 1, reached=False)):
        (tmp_path / f"countdown-async-seed{each.seed}.json").write_bytes(msgspec.json.encode(each))
    page = readme(tmp_path)
    assert "| async | 0 | 0.10 [0.05, 0.15] | 0.50 [0.45, 0.55] | 1000 | 40 | 20 | 3072 |" in page
    assert "| async | 1 | 0.10 [0.05, 0.15] | 0.50 [0.45, 0.55] | - | - | - | 3072 |" in page
    assert "the target after 1000 episodes and 40 CPU s; 1 of 2 runs did not reach the target" in page


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_figure_of_the_data_is_read_as_it_was_written(name: str) -> None:
    for path in (HERE / "data").glob(f"{name}-*.json"):
        assert path.stem == "{0.experiment}-{0.variant}-seed{0.seed}".format(
            msgspec.json.decode(path.read_bytes(), type=TrialResult)
        )
