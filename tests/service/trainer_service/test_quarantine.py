"""A group whose gradient is not finite ends as invalid; the others train as if it had never come."""

import itertools
import shutil
from collections.abc import Sequence

import pytest
import torch

from tests.support.trainer_service.harness import Harness, MakeHarness
from trainer_service.step.group_trainer import Diverged
from trainer_service.step.quarantine import non_finite_groups

POISON = 1e-42
"""A positive temperature that is so small that every logit divided by it is infinite."""


def optimizer_state(harness: Harness) -> dict[str, torch.Tensor]:
    """The optimizer's state in a checkpoint: all that the next step depends on besides the weights."""
    harness.policy.copy_states().write(harness.root / "looked-at")
    (path,) = (harness.root / "looked-at").glob("*optim_states.pt")
    state = torch.load(path, weights_only=False)
    shutil.rmtree(harness.root / "looked-at")
    found: dict[str, torch.Tensor] = {}

    def walk(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.clone()
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}", inner)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                walk(f"{name}.{index}", inner)

    walk("", state)
    assert any("exp_avg" in name for name in found)
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_group_without_a_finite_gradient_ends_invalid_and_the_others_train(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(algorithm={"min_live_rows": 6}).start()
    harness.agents.group("a", [1.0, 0.0])
    harness.agents.group("poison", [1.0, 0.0], temperature=POISON)
    harness.agents.group("b", [1.0, 0.0])
    assert not harness.trainer.run_once()
    codes = harness.session_codes()
    assert (codes["poison-0"], codes["poison-1"], codes["a-0"], codes["b-0"]) == ("invalid",) * 2 + (
        None,
    ) * 2
    verdict = harness.stream.heads["poison-0"].verdict
    assert verdict is not None
    assert verdict.detail == "its gradient is not finite at version 0"
    assert harness.stream.heads["poison-0"].turn_verdicts["poison-0-t"] == verdict
    harness.agents.group("c", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert harness.session_codes() == codes | dict.fromkeys(
        ("a-0", "a-1", "b-0", "b-1", "c-0", "c-1"), "trained"
    )
    assert not list(harness.stream.reclaim())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_optimizer_are_bitwise_what_they_are_without_that_group(
    make_harness: MakeHarness, dtype: str
) -> None:
    spared, struck = (make_harness(name, dtype=dtype).start() for name in ("spared", "struck"))
    for harness in (spared, struck):
        harness.agents.group("a", [1.0, 0.0])
        assert harness.trainer.run_once()
    before = struck.weights(), optimizer_state(struck)
    struck.agents.group("poison", [1.0, 0.0], temperature=POISON)
    assert not struck.trainer.run_once()
    assert same(before[0], struck.weights())
    assert same(before[1], optimizer_state(struck))
    for harness in (spared, struck):
        harness.agents.group("b", [0.0, 1.0, 1.0])
        assert harness.trainer.run_once()
    assert same(spared.weights(), struck.weights())
    assert same(optimizer_state(spared), optimizer_state(struck))


def test_a_restart_does_not_train_the_batch_again(harness: Harness) -> None:
    harness.agents.group("poison", [1.0, 0.0], temperature=POISON)
    assert not harness.trainer.run_once()
    harness = harness.restart()
    assert not harness.trainer.run_once()
    assert harness.stream.counts["session:invalid"] == 2
    assert harness.trainer.step == 0


def test_a_later_epoch_that_fails_ends_the_run_and_the_group(make_harness: MakeHarness) -> None:
    """The weights contain the batch's first epoch, and only the checkpoint has the former weights."""
    harness = make_harness(algorithm={"epochs": 2}).start()
    norms = itertools.chain([1.0], itertools.repeat(float("inf")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.policy, "step", lambda scale=1.0: next(norms))
        harness.agents.group("g", [1.0, 0.0])
        with pytest.raises(Diverged, match="update 2"):
            harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"invalid"}
    harness = harness.restart()
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert harness.session_codes()["h-0"] == "trained"


def test_weights_that_were_not_finite_before_the_step_end_no_group(harness: Harness) -> None:
    with torch.no_grad():
        next(harness.policy.module.parameters()).fill_(float("nan"))
    harness.agents.group("g", [1.0, 0.0])
    with pytest.raises(Diverged, match="the weights are not finite"):
        harness.trainer.run_once()
    assert harness.session_codes() == {"g-0": None, "g-1": None}
    assert harness.restart().trainer.run_once()


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ([], []),
        ([{3}], [3]),
        ([{0}, {6}], [0, 6]),
        ([{1, 2}], [1, 2]),
        ([{0, 6}], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_non_finite_groups_are_found_by_bisection(bad: Sequence[set[int]], expected: list[int]) -> None:
    """If two groups spoil a batch only together, the groups between them are blamed, too."""

    def sound(groups: Sequence[int]) -> bool:
        return not any(each <= set(groups) for each in bad)

    assert non_finite_groups(range(7), sound) == expected
