"""Guards: what makes training hold by itself, what the world sees of that, and how it goes on."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rollout_queue.web.keys import Keyring
from tests.trainer_service.rig import MakeRig, Rig
from trainer_service.app import create_app
from trainer_service.guards import Alarm, Guards, GuardSettings

STEADY = {"grad_norm": 0.5, "mismatch/abs_logp": 0.01, "mismatch/kl": 0.0, "reward_mean": 0.8}


def watched(guards: Guards, steps: Iterable[Mapping[str, float]], first: int = 1) -> list[tuple[int, Alarm]]:
    checked = [(at, guards.check({"step": at, **values})) for at, values in enumerate(steps, start=first)]
    return [(at, alarm) for at, alarm in checked if alarm is not None]


def test_a_run_that_learns_sets_nothing_off() -> None:
    """Noise, a slow rise, and a policy that has learned all there is: gradients vanish but for surprises."""
    rising = [
        STEADY | {"reward_mean": at / 200 + 0.1 * (-1) ** at, "grad_norm": 0.1 + at % 7} for at in range(200)
    ]
    learned = [
        STEADY | {"reward_mean": 1.0, "grad_norm": 50.0 if at % 40 == 39 else 1e-6} for at in range(200)
    ]
    assert not watched(Guards(GuardSettings()), [*rising, *learned])


def test_a_reward_that_never_was_more_than_noise_is_no_collapse() -> None:
    noise = [STEADY | {"reward_mean": [1.0, 0.0, -1.0, 0.1, -0.2][at * at % 5]} for at in range(300)]
    assert not watched(Guards(GuardSettings()), noise)


@pytest.mark.parametrize(
    ("guard", "value", "said"),
    [
        ("max_grad_norm_ratio", {"grad_norm": 101.0}, "the gradient of step 31 is 101, more than 100 times"),
        ("max_abs_logp", {"mismatch/abs_logp": 1.5}, "mean |Δlogprob| between trainer and engine is 1.5 in"),
        ("max_abs_logp", {"mismatch/abs_logp": float("nan")}, "|Δlogprob| between trainer and engine is nan"),
        ("max_kl", {"mismatch/kl": -2.0}, "the KL between engine and trainer is -2 in step 31, beyond 1"),
    ],
)
def test_one_step_far_off_sets_off_its_guard_in_words_and_a_null_one_sets_off_nothing(
    guard: str, value: dict[str, float], said: str
) -> None:
    steps = [*[STEADY] * 30, STEADY | value, STEADY, STEADY]
    ((at, alarm),) = watched(Guards(GuardSettings()), steps)
    assert (at, alarm.guard) == (31, guard)
    assert said in alarm.reason
    assert f"(guards.{guard})" in alarm.reason
    assert not watched(Guards(GuardSettings(**{guard: None})), steps)


def test_a_gradient_is_not_called_large_before_anybody_knows_what_is_usual() -> None:
    assert not watched(Guards(GuardSettings()), [STEADY] * 19 + [STEADY | {"grad_norm": 1e6}])


def test_a_reward_that_collapses_is_seen_and_not_told_twice() -> None:
    collapse = [STEADY] * 50 + [STEADY | {"reward_mean": 0.1}] * 100
    guards = Guards(GuardSettings())
    ((at, alarm),) = watched(guards, collapse)
    assert 50 < at <= 70
    assert alarm.reason.startswith("the mean reward of the last 20 steps is 0.3")
    assert "and was 0.8 at best (guards.reward_drop)" in alarm.reason
    assert not watched(guards, [STEADY] * 20, first=151), "better is no alarm"
    ((_, again),) = watched(guards, [STEADY | {"reward_mean": 0.0}] * 20, first=171)
    assert again.guard == "reward_drop"


def test_a_value_that_is_seen_again_is_told_again() -> None:
    off = STEADY | {"mismatch/kl": 2.0}
    assert [at for at, _ in watched(Guards(GuardSettings()), [off, STEADY, off])] == [1, 3]


@pytest.fixture
def held(make_rig: MakeRig) -> Rig:
    """A trainer that a guard has paused: the made-up logprobs of the rig differ from the model's."""
    rig = make_rig(guards={"max_abs_logp": 1e-3}).start()
    rig.agents.group("g", [1.0, 0.0])
    assert rig.trainer.turn()
    rig.agents.group("h", [1.0, 0.0])
    rig.face.stop()  # so that a paused turn does not sleep
    assert not rig.trainer.turn()
    return rig


def door(rig: Rig) -> TestClient:
    keyring = Keyring([], ["admin"])
    app = create_app(rig.face, rig.checkpoints.ledger, rig.store, keyring, rig.registry)
    return TestClient(app, headers={"authorization": "Bearer admin"})


def sample(rig: Rig, name: str, **labels: str) -> float | None:
    value: float | None = rig.registry.get_sample_value(f"weir_trainer_{name}", labels)
    return value


def test_a_guard_pauses_behind_the_checkpoint_and_before_the_version_is_served(held: Rig) -> None:
    assert not held.gateway.announced
    assert held.session_codes()["g-0"] == "trained"
    assert [row.step for row in held.checkpoints.ledger(0, 10)] == [1]
    status = door(held).get("/status").json()
    assert status["state"] == "paused"
    assert status["waiting_for"].startswith(
        "POST /resume, since mean |Δlogprob| between trainer and engine is"
    )
    report: dict[str, Any] = dict(held.stream.trainer)
    assert (report["state"], report["waiting_for"]) == ("paused", status["waiting_for"])
    assert sample(held, "paused") == 1
    assert sample(held, "guard_alarms_total", guard="max_abs_logp") == 1
    assert json.loads((held.root / "metrics.jsonl").read_text())["step"] == 1


def test_a_resume_serves_what_was_held_and_goes_on(held: Rig) -> None:
    door(held).post("/resume")
    held.trainer.turn()
    assert [body["version"] for body in held.gateway.announced] == [1]
    assert held.trainer.step == 2
    assert held.face.paused, "what the next step shows is new evidence"
    assert sample(held, "guard_alarms_total", guard="max_abs_logp") == 2
    door(held).post("/resume")
    held.trainer.turn()
    assert [body["version"] for body in held.gateway.announced] == [1, 2]
    assert held.face.snapshot.state == "waiting"
    assert sample(held, "paused") == 0


def test_an_operators_pause_says_so_and_holds_no_version_back(make_rig: MakeRig) -> None:
    rig = make_rig().start()
    rig.agents.group("g", [1.0, 0.0])
    rig.face.pause()
    rig.face.stop()
    assert not rig.trainer.turn()
    assert rig.face.snapshot.waiting_for == "POST /resume"
    rig.face.resume()
    assert rig.trainer.turn()
    assert [body["version"] for body in rig.gateway.announced] == [1]


def test_a_restart_is_a_resume(held: Rig) -> None:
    """A pause is of one process: the next one serves what is in its checkpoint, and trains on."""
    again = held.restart()
    assert [body["version"] for body in again.gateway.announced] == [1]
    assert again.trainer.turn()
    assert again.trainer.step == 2
