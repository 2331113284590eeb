"""The pictures of a run are PNG files; without rewards there is none."""

from pathlib import Path

from environments.results.picture import draw, draw_evaluations

PNG = b"\x89PNG"


def test_the_moving_mean_of_rewards_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "none.png", "a run", [])
    draw(tmp_path / "reward.png", "a run", [0.0, 1.0, 0.5])
    assert [path.name for path in tmp_path.iterdir()] == ["reward.png"]
    assert (tmp_path / "reward.png").read_bytes()[:4] == PNG


def test_evaluations_are_drawn_with_their_intervals(tmp_path: Path) -> None:
    judged = [{"version": each, "reward": {"mean": 0.5, "low": 0.4, "high": 0.7}} for each in (0, 3)]
    draw_evaluations(tmp_path / "none.png", "a run", [{"version": 0, "error": "no environment"}])
    draw_evaluations(tmp_path / "evaluations.png", "a run", [*judged, {"version": 6, "reward": None}])
    assert [path.name for path in tmp_path.iterdir()] == ["evaluations.png"]
    assert (tmp_path / "evaluations.png").read_bytes()[:4] == PNG
