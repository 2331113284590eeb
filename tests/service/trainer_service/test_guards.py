"""Guards pause the training. Checks which values do so, what is reported and served, and how to resume."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from safetensors.torch import load_file

from rollout_queue.contract.records import Span
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.same_training import differs_by
from trainer_service.groups.guards import Guards
from trainer_service.groups.reward_guard import Alarm, EvaluationReward, GroupReward
from trainer_service.settings import GuardSettings

STEADY = {
    "grad_norm": 0.5,
    "mismatch/abs_logp": 0.01,
    "mismatch/abs_logp_current": 0.01,
    "mismatch/kl": 0.0,
    "mismatch/kl_current": 0.0,
}
WINDOW = GuardSettings().reward_groups


def watched(guards: Guards, steps: Iterable[Mapping[str, float]], first: int = 1) -> list[tuple[int, Alarm]]:
    checked = [
        (at, guards.check_step({"step": at, **values})) for at, values in enumerate(steps, start=first)
    ]
    return [(at, alarm) for at, alarm in checked if alarm is not None]


def told(guards: Guards, rewards: Iterable[float], task_id: str | None = None) -> list[tuple[int, Alarm]]:
    """The alarms for these rewards, with the numbers of their groups, counted from 1."""
    groups = enumerate((GroupReward(task_id, reward) for reward in rewards), start=1)
    heard = [(at, guards.check_rewards([group])) for at, group in groups]
    return [(at, alarm) for at, alarm in heard if alarm is not None]


def test_a_run_that_learns_raises_no_alarm() -> None:
    """The rewards are noisy and rise slowly. In the end gradients vanish, except for single large ones."""
    rising = [STEADY | {"grad_norm": 0.1 + at % 7} for at in range(200)]
    learned = [STEADY | {"grad_norm": 50.0 if at % 40 == 39 else 1e-6} for at in range(200)]
    guards = Guards(GuardSettings())
    assert not watched(guards, [*rising, *learned])
    assert not told(guards, [at / 1000 + 0.1 * (-1) ** at for at in range(1000)] + [1.0] * 200)


def test_rewards_that_are_only_noise_raise_no_alarm() -> None:
    """Neither does a large gradient in the first steps, nor an evaluation of an older version."""
    noise = [[1.0, 0.0, -1.0, 0.1, -0.2][at * at % 5] for at in range(1000)]
    assert not told(Guards(GuardSettings()), noise)
    assert not watched(Guards(GuardSettings()), [STEADY] * 19 + [STEADY | {"grad_norm": 1e6}])
    guards = Guards(GuardSettings())
    for version in (7, 0, 3):
        assert not evaluated(guards, version, [float(version == 7)] * 2 * WINDOW)


@pytest.mark.parametrize(
    ("guard", "value", "said"),
    [
        ("max_grad_norm_ratio", {"grad_norm": 101.0}, "the gradient of step 31 is 101, more than 100 times"),
        (
            "max_abs_logp",
            {"mismatch/abs_logp_current": 1.5},
            "mean |Δlogprob| between trainer and engine is 1.5 in",
        ),
        (
            "max_abs_logp",
            {"mismatch/abs_logp_current": float("nan")},
            "|Δlogprob| between trainer and engine is nan",
        ),
        ("max_kl", {"mismatch/kl_current": -2.0}, "the KL between engine and trainer is -2 in step 31, on"),
    ],
)
def test_one_extreme_step_raises_an_alarm_unless_its_guard_is_off(
    guard: str, value: dict[str, float], said: str
) -> None:
    steps = [*[STEADY] * 30, STEADY | value, STEADY, STEADY]
    ((at, alarm),) = watched(Guards(GuardSettings()), steps)
    assert (at, alarm.guard) == (31, guard)
    assert said in alarm.reason
    assert f"(guards.{guard})" in alarm.reason
    assert not watched(Guards(GuardSettings(**{guard: None})), steps)


@pytest.mark.parametrize(("guard", "metric"), [("max_abs_logp", "abs_logp"), ("max_kl", "kl")])
def test_the_mismatch_is_judged_where_the_trainers_own_version_sampled(
    make_harness: MakeHarness, guard: str, metric: str
) -> None:
    """What learning moved between two versions is not a fault: how far, the learning rate decides."""
    guards = {"max_abs_logp": None, "max_kl": None, "max_recoveries": 0, guard: 10.0}
    harness = make_harness(guards=guards, initial_version=7).start()
    harness.step("old", version=6, logprobs=[-90.0] * 3)
    assert f"mismatch/{metric}_current" not in harness.told
    assert not harness.shared_state.paused
    both = (Span(7, 0, 1), Span(8, 1, 3))
    harness.step("mixed", versions=both, logprobs=[-90.0, -4.0, -4.0])
    assert abs(harness.told[f"mismatch/{metric}_current"]) < 10 < abs(harness.told[f"mismatch/{metric}"])
    assert not harness.shared_state.paused
    harness.step("own", versions=(Span(8, 0, 2), Span(9, 2, 3)), logprobs=[-4.0, -4.0, -90.0])
    assert harness.shared_state.paused
    assert "on tokens of the trainer's own version" in str(harness.trainer.hold.reason)


def test_a_step_without_a_finite_logprob_raises_an_alarm() -> None:
    stale = {"grad_norm": 0.5, "mismatch/abs_logp": 9.0, "mismatch/kl": 9.0}
    assert not watched(Guards(GuardSettings()), [stale]), "it has no token of the present version"
    for guard, other in (("max_abs_logp", "max_kl"), ("max_kl", "max_abs_logp")):
        ((_, alarm),) = watched(Guards(GuardSettings(**{other: None})), [{"grad_norm": 0.5}])
        assert (alarm.guard, "is nan" in alarm.reason) == (guard, True)


def test_an_extreme_value_that_comes_again_raises_a_second_alarm() -> None:
    off = STEADY | {"mismatch/kl_current": 2.0}
    assert [at for at, _ in watched(Guards(GuardSettings()), [off, STEADY, off])] == [1, 3]


def test_a_collapse_of_the_reward_raises_one_alarm() -> None:
    guards = Guards(GuardSettings())
    ((at, alarm),) = told(guards, [0.8] * 300 + [0.1] * 300)
    assert 300 + WINDOW // 2 < at <= 300 + WINDOW
    assert alarm.guard == "reward_drop"
    assert alarm.reason.startswith(f"the mean reward of the last {WINDOW} groups is 0.38")
    assert "and was 0.8 at best (guards.reward_drop)" in alarm.reason
    assert not told(guards, [0.8] * 2 * WINDOW), "better is no alarm"
    ((_, again),) = told(guards, [0.0] * WINDOW)
    assert again.guard == "reward_drop"
    collapse = [GroupReward(None, reward) for reward in (0.8, 0.0) for _ in range(WINDOW)]
    assert Guards(GuardSettings()).check_rewards(collapse) is not None, "also in one call"
    assert Guards(GuardSettings(reward_drop=None)).check_rewards(collapse) is None, "the guard is off"
    assert Guards(GuardSettings()).check_rewards(collapse[1:]) is None, "too little to compare"


def evaluated(guards: Guards, version: int, rewards: Iterable[float]) -> list[Alarm]:
    heard = [guards.check_rewards([], [EvaluationReward(None, version, reward)]) for reward in rewards]
    return [alarm for alarm in heard if alarm is not None]


FAILURES_FIRST = [0.0] * 4 * WINDOW + [1.0] * 4 * WINDOW


def test_the_order_in_which_a_version_s_evaluations_end_raises_no_alarm() -> None:
    guards = Guards(GuardSettings())
    assert not evaluated(guards, 0, FAILURES_FIRST[::-1])
    assert not evaluated(guards, 0, FAILURES_FIRST)
    guards = Guards(GuardSettings())
    for version, rewards in enumerate((FAILURES_FIRST[::-1], FAILURES_FIRST, FAILURES_FIRST[::-1])):
        assert not evaluated(guards, version, rewards)


def test_a_version_that_evaluates_worse_than_an_earlier_one_raises_one_alarm_also_after_a_restart() -> None:
    guards = Guards(GuardSettings())
    assert not evaluated(guards, 3, [0.75, 1.0] * (WINDOW // 2))
    assert not evaluated(guards, 4, [1.0]), "one session makes it not the best"
    for version in range(100, 130):  # neither does the best one get lost among more than are kept
        assert not evaluated(guards, version, [0.75, 0.5] * (WINDOW // 2))
    again = Guards(GuardSettings())
    again.resume(guards.state)
    (alarm,) = evaluated(again, 200, [0.0, 0.25] * (WINDOW // 2))
    assert alarm.guard == "reward_drop"
    assert alarm.reason == (
        f"the mean reward of {WINDOW} evaluation sessions of version 200 is 0.125, and was 0.875 of version "
        "3 (guards.reward_drop)"
    )
    assert sum(len(rewards) for rewards in guards.state.by_task.evaluated[""].values()) <= 17 * 256
    assert not evaluated(again, 201, [0.0] * WINDOW)


def test_a_small_evaluation_is_judged_when_the_next_version_has_one() -> None:
    guards = Guards(GuardSettings())
    assert not evaluated(guards, 1, [0.75, 1.0] * 2 * WINDOW)
    assert not evaluated(guards, 2, [0.0, 0.25] * (WINDOW // 2)), "more of its sessions may come"
    (alarm,) = evaluated(guards, 3, [0.0])
    assert f"of {WINDOW} evaluation sessions of version 2 is 0.125" in alarm.reason


@pytest.fixture
def held(make_harness: MakeHarness) -> Harness:
    """A trainer that a guard has held, because the harness's invented logprobs differ from the model's."""
    harness = make_harness(guards={"max_abs_logp": 1e-3, "max_recoveries": 0}).start()
    harness.first = harness.weights()  # type: ignore[attr-defined]
    harness.step("g")
    harness.agents.group("h", [1.0, 0.0])
    harness.sleepless()
    assert not harness.trainer.run_once()
    return harness


def test_a_guard_pauses_before_the_version_is_saved_or_served(held: Harness) -> None:
    assert not held.gateway.announced
    assert set(held.checkpoints.versions()) == {0, 2}, "1 is the version of the alarm"
    assert differs_by(held.weights(), held.first) == 0  # type: ignore[attr-defined]
    assert held.session_codes()["g-0"] == "trained"
    assert [row.step for row in held.ledger] == [1]
    status = held.door().get("/status").json()
    assert status["state"] == "paused"
    assert status["waiting_for"].startswith(
        "POST /resume, since mean |Δlogprob| between trainer and engine is"
    )
    report: dict[str, Any] = dict(held.stream.trainer)
    assert (report["state"], report["waiting_for"]) == ("paused", status["waiting_for"])
    assert held.sample("paused") == 1
    assert held.sample("guard_alarms_total", guard="max_abs_logp") == 1
    assert json.loads((held.root / "metrics.jsonl").read_text())["step"] == 1


def test_a_pause_names_refused_pushes_as_its_cause(make_harness: MakeHarness) -> None:
    """Engines that go on with older weights differ from the trainer's."""
    harness = make_harness(guards={"max_kl": 2.0, "max_recoveries": 0}).start()
    harness.gateway.server_ok = False
    for group_id in ("a", "b"):
        harness.step(group_id)
    harness.agents.group("c", [1.0, 0.0], version=harness.trainer.version, logprobs=[-9.0] * 3)
    harness.trainer.run_once()
    reason = str(harness.trainer.hold.reason)
    pushes = r"the last \d push(es were| was) refused"
    assert re.match(rf"engines sample with older weights: {pushes}: r0: broken; ", reason)
    assert "the KL between engine and trainer is" in reason


@pytest.mark.parametrize("restarted", [False, True])
def test_a_resume_publishes_nothing_that_was_held_and_continues(held: Harness, restarted: bool) -> None:
    first = held.first  # type: ignore[attr-defined]
    if restarted:
        held = held.restart()
        held.sleepless()
        assert held.shared_state.paused
        assert not held.gateway.announced
    held.save()
    held.door().post("/resume")
    held.trainer.run_once()
    assert held.gateway.announced_versions == [2, 3]
    assert 1 not in held.store.versions()
    published = load_file(held.store.path_of(2) / "model.safetensors")
    assert all(published[name].equal(first[name].to(each.dtype)) for name, each in published.items())
    assert held.trainer.step == 2
    assert not held.shared_state.paused, "its tokens are of an earlier version: learning itself moved them"
    held.step("i", version=3)
    assert held.shared_state.paused, "its tokens are of the trainer's own version"
    assert held.gateway.announced_versions == [2, 3]
    assert held.sample("guard_alarms_total", guard="max_abs_logp") == (1 if restarted else 2)
    held.door().post("/resume")
    held.trainer.run_once()
    assert held.gateway.announced_versions == [2, 3, 5]
    assert held.shared_state.snapshot.state == "waiting"
    assert held.sample("paused") == 0


def test_a_reward_that_falls_to_0_pauses_the_training_without_a_step(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(guards={"reward_groups": 2}).start()
    for name in ("a", "b"):
        harness.agents.group(name, [1.0, 1.0])
    for name in ("c", "d"):
        harness.agents.group(name, [0.0, 0.0])
    harness.sleepless()
    assert not harness.trainer.run_once()
    harness.trainer.run_once()
    assert harness.shared_state.paused
    assert harness.trainer.step == 0
    said = harness.door().get("/status").json()["waiting_for"]
    assert said.startswith("POST /resume, since the mean reward of the last 2 groups is 0, and was 1 at best")
    assert harness.sample("guard_alarms_total", guard="reward_drop") == 1
    assert {harness.session_codes()[name] for name in ("a-0", "c-0", "d-1")} == {"zero_advantage"}
    harness.door().post("/resume")
    harness.step("e")
    assert harness.gateway.announced_versions == [1], "the first pause had no unpublished version"


def collapsed(make_harness: MakeHarness, **settings: Any) -> Harness:
    """A trainer held by its rewards: version 0 did well, and the newest version, 1, did not. So the weights
    of version 0 are version 2 now."""
    harness = make_harness(guards={"reward_groups": 2, "max_recoveries": 0}, **settings).start()
    harness.agents.group("a", [1.0, 0.5])
    assert harness.trainer.run_once()
    for name, reward, version in (("b", 0.75, 0), ("c", 0.0, 1), ("d", 0.0, 1)):
        harness.agents.group(name, [reward, reward], version=version)
    harness.sleepless()
    assert not harness.trainer.run_once()
    assert harness.shared_state.paused
    return harness


@pytest.mark.parametrize("publish_every_steps", [1, 2])
def test_a_resume_serves_the_restored_weights_under_their_new_number(
    make_harness: MakeHarness, publish_every_steps: int
) -> None:
    """Otherwise all rollouts would come from an old version and be stale, so that no step could be made."""
    harness = collapsed(make_harness, publish_every_steps=publish_every_steps)
    assert harness.gateway.served == 0
    harness.door().post("/resume")
    harness.trainer.run_once()
    assert harness.gateway.served == harness.trainer.version == 2


def test_a_held_training_stays_held_after_a_restart(make_harness: MakeHarness) -> None:
    harness = collapsed(make_harness).restart()
    harness.sleepless()
    assert not harness.trainer.run_once()
    assert harness.gateway.served == 0
    said = harness.door().get("/status").json()
    assert said["state"] == "paused"
    assert said["waiting_for"].startswith("POST /resume, since the mean reward of the last 2 groups is 0")
    (harness.settings.checkpoint_dir / "HELD").write_text("an earlier release wrote the reason alone")
    again = harness.restart()
    assert again.trainer.hold.reason == "an earlier release wrote the reason alone"
    again.door().post("/resume")
    again.trainer.run_once()
    assert again.gateway.served == 2
    assert not again.restart().shared_state.paused


def test_the_rewards_of_a_group_that_waits_for_its_step_are_checked_once(make_harness: MakeHarness) -> None:
    harness = make_harness(guards={"reward_groups": 2}, algorithm={"min_live_rows": 100}).start()
    good, bad = [1.0, 0.5], [0.25, 0.0]
    for name, rewards in (("a", good), ("b", bad)):
        harness.agents.group(name, rewards)
        for _ in range(3):
            harness.trainer.run_once()
    assert not harness.shared_state.paused
    for name, rewards in (("c", good), ("d", good), ("e", bad), ("f", bad)):
        harness.agents.group(name, rewards)
        harness.trainer.run_once()
    assert harness.shared_state.paused
    assert "is 0.125, and was 0.75 at best" in str(harness.trainer.hold.reason)


def test_the_rewards_of_a_group_without_its_stragglers_are_checked_once_despite_a_backlog(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a group does not count as complete while more entries wait than one read returns."""
    algorithm = {"min_live_rows": 100, "group_deadline_s": 60.0}
    harness = make_harness(guards={"reward_groups": 2}, algorithm=algorithm).start()
    for number, reward in enumerate((1.0, 0.5)):
        harness.agents.episode(f"a-{number}", reward, group_id="a", size=4)
    for number, count in enumerate((1000, 1, 1000, 1, 1000)):
        monkeypatch.setattr("trainer_service.entry_reader.READ_COUNT", count)
        harness.agents.open(f"other-{number}")
        harness.agents.call(turn(f"other-{number}", f"other-{number}-t"))
        harness.trainer.run_once()
    for name, reward in (("b", 1.0), ("c", 0.0), ("d", 0.0)):
        harness.agents.group(name, [reward, reward])
    harness.trainer.run_once()
    assert " in 8 sessions, and is served" in str(harness.trainer.hold.reason)


def test_evaluations_are_compared_with_evaluations(make_harness: MakeHarness) -> None:
    """Those of sessions whose calls were pinned to a version, too."""
    harness = make_harness(guards={"reward_groups": 2}).start()
    for name in ("a", "b"):
        harness.agents.group(name, [1.0, 1.0])
    harness.agents.evaluate("e", 0.5)
    harness.agents.evaluate("f", 0.5)
    harness.trainer.run_once()
    harness.trainer.run_once()
    assert not harness.shared_state.paused, "they are below the training sessions, and always were"
    harness.agents.evaluate("g", 0.0, version=1)
    harness.agents.open("pinned")
    harness.agents.call(turn("pinned", "t", version=1, policy="policy@1"))
    harness.agents.finish("pinned", 0.0)
    harness.trainer.run_once()
    reason = str(harness.trainer.hold.reason)
    assert reason.startswith("the mean reward of 2 evaluation sessions of version 1 is 0, and was 0.5 of")
    assert {harness.session_codes()[name] for name in ("e", "f", "g", "pinned")} == {"not_for_training"}


def served_by(make_harness: MakeHarness, *rewards: tuple[float, float], **settings: Any) -> Harness:
    """A trainer whose versions, from 0 on, each had ten groups with these mean rewards, and which a guard has
    just paused."""
    harness = make_harness(
        guards={"max_abs_logp": 100.0, "reward_drop": None, "max_recoveries": 0, **settings},
        keep_policies=2,
    ).start()
    for version, values in enumerate(rewards):
        for number in range(9):
            harness.agents.group(f"v{version}-{number}", [sum(values) / 2] * 2, version=version)
        harness.agents.group(f"v{version}", values, version=version)
        assert harness.trainer.run_once()
    assert not harness.shared_state.paused
    assert harness.gateway.announced_versions == [*range(1, len(rewards) + 1)]
    harness.step("strange", version=len(rewards), logprobs=[-400.0] * 3)
    harness.sleepless()
    assert not harness.trainer.run_once()
    return harness


def test_an_alarm_makes_the_fleet_serve_the_best_version_on_disk(
    make_harness: MakeHarness,
) -> None:
    harness = served_by(make_harness, (0.3, 0.1), (1.0, 0.8), (0.5, 0.3), (0.4, 0.2), (0.2, 0.0))
    assert harness.store.versions() == [1, 4, 5]
    assert harness.gateway.rolled_back_to == 1
    said = harness.door().get("/status").json()["waiting_for"]
    assert said.endswith("; version 1 did best, 0.9 in 20 sessions, and is served")
    harness.door().post("/resume")
    harness.trainer.run_once()
    assert harness.gateway.served == 7
    assert 6 not in harness.gateway.announced_versions


@pytest.mark.parametrize(("rolls_back", "served"), [(True, 0), (False, 2)])
def test_the_best_version_may_be_the_one_before_any_training_and_a_setting_turns_the_rollback_off(
    make_harness: MakeHarness, rolls_back: bool, served: int
) -> None:
    harness = served_by(make_harness, (1.0, 0.8), (0.5, 0.3), roll_back=rolls_back)
    assert harness.gateway.served == served
    assert ("is served" in harness.door().get("/status").json()["waiting_for"]) == rolls_back


def test_a_rollback_to_a_version_unknown_to_the_gateway_is_only_logged(
    make_harness: MakeHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness(guards={"max_abs_logp": 1e-3, "max_recoveries": 0}, initial_version=7).start()
    harness.step("g", version=7)
    assert harness.shared_state.paused
    assert "the fleet goes on with what it serves: no policy has version 7" in caplog.text
    assert "is served" not in str(harness.trainer.hold.reason)


@pytest.mark.parametrize("server_ok", [True, False])
def test_a_rollback_waits_for_a_gateway_that_is_away_and_is_not_reported_if_no_server_made_it(
    make_harness: MakeHarness, server_ok: bool
) -> None:
    harness = make_harness(guards={"max_abs_logp": 1e-3, "max_recoveries": 0}).start()
    harness.gateway.versions.append(3)  # so that version 0 is not already served
    harness.gateway.refusals, harness.gateway.server_ok = 2, server_ok
    harness.step("g")
    assert harness.shared_state.paused
    assert harness.gateway.rolled_back_to == 0
    assert ("is served" in str(harness.trainer.hold.reason)) == server_ok


def test_an_operators_pause_says_so_and_holds_no_version_back(harness: Harness) -> None:
    """It ends with the process."""
    harness.agents.group("g", [1.0, 0.0])
    harness.shared_state.pause()
    harness.sleepless()
    assert not harness.trainer.run_once()
    assert (harness.shared_state.snapshot.state, harness.waits_for) == ("paused", "POST /resume")
    assert not harness.restart().shared_state.paused
    harness.shared_state.resume()
    assert harness.trainer.run_once()
    assert harness.gateway.announced_versions == [1]
