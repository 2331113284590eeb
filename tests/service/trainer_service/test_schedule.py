"""The learning rate of each step, by settings."""

import pytest
from pydantic import ValidationError

from tests.support.trainer_service.random_rows import MakeLearner
from trainer_service.model.schedule import schedule_of
from trainer_service.model.settings import OptimizerSettings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"warmup_steps": 0}, [1, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ({"schedule": "linear", "warmup_steps": 2, "total_steps": 6}, [0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        (
            {"schedule": "linear", "warmup_steps": 0, "total_steps": 4, "min_lr_ratio": 0.2},
            [0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2],
        ),
        (
            {"schedule": "cosine", "warmup_steps": 1, "total_steps": 5, "min_lr_ratio": 0.1},
            [1, 0.86819805, 0.55, 0.23180195, 0.1, 0.1, 0.1],
        ),
    ],
)
def test_every_step_has_its_factor_of_the_rate(given: dict[str, object], expected: list[float]) -> None:
    factor = schedule_of(OptimizerSettings.model_validate(given))
    assert [factor(step) for step in range(7)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"schedule": "cosine"}, "schedule cosine needs total_steps"),
        ({"schedule": "linear", "warmup_steps": 5, "total_steps": 5}, "more than warmup_steps"),
        ({"total_steps": 10}, "need schedule linear or cosine"),
        ({"min_lr_ratio": 0.1}, "need schedule linear or cosine"),
    ],
)
def test_a_schedule_that_has_no_end_or_no_use_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        OptimizerSettings.model_validate(given)


def test_the_policy_steps_by_its_schedule(make_learner: MakeLearner) -> None:
    still = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 0, "total_steps": 2}
    learner = make_learner(optimizer=still)
    before = learner.exported()
    learner.learn(1)
    moved = learner.exported()
    assert any((moved[name] != before[name]).any() for name in before)
    learner.learn(2)
    assert all((moved[name] == tensor).all() for name, tensor in learner.exported().items()), "the rate is 0"
