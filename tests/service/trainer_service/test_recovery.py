"""A training that goes wrong goes back to the best checkpoint by itself, and no token is trained twice."""

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.long_cases import cases
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.random_rows import MakeLearner
from tests.support.trainer_service.same_training import differs_by
from trainer_service.heartbeat import Stopped
from trainer_service.storage.checkpoint import INITIAL, Checkpoints
from trainer_service.storage.run_state import RunState

GUARDS = {"max_abs_logp": 100.0, "reward_drop": None, "recovery_lr_factor": 0.5}
"""Only a step whose tokens have absurd log-probabilities raises an alarm."""
STRANGE = [-400.0] * 3
numbers = itertools.count()


def good(harness: Harness, reward: float, **fields: Any) -> None:
    """A step of sessions that the newest version sampled, with this mean reward."""
    name = f"good-{next(numbers)}"
    version = fields.pop("version", harness.trainer.version)
    harness.agents.group(name, [reward + 0.1, reward - 0.1], version=version, **fields)
    assert harness.trainer.run_once()


def strange(harness: Harness, **fields: Any) -> str:
    """A step that raises an alarm. Returns its group."""
    name = f"strange-{next(numbers)}"
    harness.step(name, version=harness.trainer.version, logprobs=STRANGE, **fields)
    return name


@pytest.fixture
def harness(make_harness: MakeHarness) -> Harness:
    """Version 1 did best, then version 2 not so well; 3 is the newest."""
    algorithm = {"max_rows": 2}
    harness = make_harness(guards=GUARDS, keep_checkpoints=2, algorithm=algorithm).start()
    good(harness, 0.1)
    harness.best = harness.weights()  # type: ignore[attr-defined]
    for reward in (0.9, 0.3):
        good(harness, reward)
    return harness


def test_an_alarm_brings_back_the_weights_of_the_best_version_and_the_training_goes_on(
    harness: Harness,
) -> None:
    group = strange(harness)
    assert not harness.shared_state.paused
    assert differs_by(harness.weights(), harness.best) == 0  # type: ignore[attr-defined]
    assert 4 not in harness.checkpoints.versions()
    assert harness.trainer.version == 5, "number 4 is that of the step that is undone"
    assert harness.gateway.announced_versions == [1, 2, 3, 5]
    assert harness.session_codes()[f"{group}-0"] == "trained"
    good(harness, 0.5)
    assert harness.trainer.step == 5
    assert [row.step for row in harness.ledger] == [1, 2, 3, 4, 5]
    said = harness.door().get("/rollback").json()
    assert said["lr_scale"] == 0.5
    (recovery,) = said["recoveries"]
    assert (recovery["version"], recovery["restored"], recovery["step"]) == (5, 1, 4)
    assert recovery["automatic"]
    assert "version 1 did best, 0.9 in 2 sessions" in recovery["reason"]
    assert harness.registry.get_sample_value("weir_trainer_recoveries_total", {"by": "guard"}) == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_what_undone_versions_sampled_is_not_trained(harness: Harness, restarted: bool) -> None:
    for name, version in (("of-1", 1), ("of-3", 3)):
        harness.agents.group(name, [1.0, 0.0], version=version)
    strange(harness)  # takes the newest group alone
    again = harness.restart() if restarted else harness
    assert again.trainer.version == 5
    assert differs_by(again.weights(), harness.best) == 0  # type: ignore[attr-defined]
    while again.trainer.run_once():
        pass
    codes = again.session_codes()
    assert (codes["of-1-0"], codes["of-3-0"]) == ("trained", "stale")
    why = "sampled by version 3, and the training went back to version 1"
    assert again.verdict("of-3-0").detail == why


def test_after_so_many_recoveries_an_alarm_holds_the_training(make_harness: MakeHarness) -> None:
    harness = make_harness(guards=GUARDS | {"max_recoveries": 1}).start()
    good(harness, 0.1)
    good(harness, 0.9)
    strange(harness)
    assert not harness.shared_state.paused
    harness = harness.restart()
    good(harness, 0.5)
    strange(harness)
    assert harness.shared_state.paused, "a restart does not forget the first recovery"


@pytest.mark.parametrize(
    "options", [{}, {"zero_stage": 2, "dtype": "bfloat16"}, {"lora": {"rank": 4}}], ids=str
)
def test_a_training_that_never_helped_goes_back_to_its_first_version(
    make_harness: MakeHarness, options: dict[str, Any]
) -> None:
    """By itself and by hand, although there has been no step before the alarm that was good."""
    harness = make_harness(guards=GUARDS, **options).start()
    first = harness.weights()
    good(harness, 0.9)
    good(harness, 0.3)
    strange(harness)
    assert not harness.shared_state.paused
    assert harness.trainer.version == 4
    assert differs_by(harness.weights(), first) == 0
    good(harness, 0.9)
    again = harness.restart()
    assert differs_by(again.weights(), first) > 0
    asked = again.shared_state.request_rollback(0)
    again.trainer.run_once()
    asked.result(0)
    assert differs_by(again.weights(), first) == 0
    assert [each["restored"] for each in again.door().get("/rollback").json()["recoveries"]] == [0, 0]


@pytest.mark.parametrize("alarm", ["rewards", "step"])
def test_a_second_task_undoes_nothing_of_the_first_and_keeps_what_it_learned(
    make_harness: MakeHarness, alarm: str
) -> None:
    """It begins far below the first one. When it collapses, or a step goes wrong, its own best version comes
    back, and not that of the first task, which did better."""
    guards = {**GUARDS, "reward_drop": 0.5, "reward_groups": 2}
    harness = make_harness(guards=guards).start()
    for task_id, rewards in (("easy:1", [0.1, 0.9, 0.9]), ("hard:1", [0.1, 0.1, 0.6])):
        for reward in rewards:
            good(harness, reward, task_id=task_id)
    best = harness.weights()
    good(harness, 0.6, task_id="hard:1")
    assert not harness.shared_state.recovery.done
    if alarm == "rewards":
        for _ in range(2):
            name = f"bad-{next(numbers)}"
            harness.agents.group(name, [0.0, 0.0], version=harness.trainer.version, task_id="hard:1")
            assert not harness.trainer.run_once()
    else:
        good(harness, 0.1, task_id="hard:1")
        strange(harness, task_id="hard:1")
    (recovery,) = harness.shared_state.recovery.done
    assert recovery.restored == 6, recovery.reason
    assert "version 6 did best, 0.6 in 2 sessions" in recovery.reason
    assert ("of task hard:1 is 0, and was 0.6 at best" in recovery.reason) == (alarm == "rewards")
    assert differs_by(harness.weights(), best) == 0


def test_a_new_task_has_no_best_even_if_nothing_is_trained(make_harness: MakeHarness) -> None:
    """Groups whose rewards are equal make no step. Evaluations of another task are no fall either."""
    harness = make_harness(guards={"reward_groups": 2}).start()
    for task_id, reward in (("always", 1.0), ("never", 0.0)):
        for number in range(4):
            harness.agents.group(f"{task_id}-{number}", [reward] * 2, task_id=task_id)
            harness.agents.evaluate(f"{task_id}-{number}-e", reward, version=int(reward), task_id=task_id)
        harness.trainer.run_once()
    assert not harness.shared_state.paused
    assert not harness.shared_state.recovery.done
    assert harness.sample("guard_alarms_total", guard="reward_drop") is None


def test_a_run_that_has_no_checkpoint_of_its_first_version_gets_one_when_it_is_restarted(
    harness: Harness,
) -> None:
    """As a run of an older release. The position and the ledger stay as they are."""
    tags = harness.checkpoints.versions()
    shutil.rmtree(harness.settings.checkpoint_dir / tags.pop(0))
    (harness.settings.checkpoint_dir / INITIAL).mkdir()  # what a killed process has left
    again = harness.restart()
    assert set(again.checkpoints.versions()) == {0, *tags}
    assert (again.trainer.step, again.trainer.version) == (3, 3)
    assert differs_by(again.weights(), harness.weights()) == 0
    good(again, 0.2)
    assert [row.step for row in again.ledger] == [1, 2, 3, 4]
    assert 0 in again.checkpoints.versions()


def test_the_learning_rate_is_cut_for_good(make_harness: MakeHarness) -> None:
    harness = make_harness(guards=GUARDS | {"recovery_lr_factor": 1e-30}).start()
    good(harness, 0.1)
    good(harness, 0.9)
    strange(harness)
    for each in (harness, harness.restart()):
        before = each.weights()
        good(each, 0.5)
        assert differs_by(each.weights(), before) == 0


@pytest.mark.parametrize("moment", ["load", "copy_states", "write", "publish"])
def test_a_trainer_that_dies_in_a_recovery_trains_nothing_twice(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    owner = {"publish": harness.trainer.publisher, "write": harness.checkpoints}.get(moment, harness.policy)
    monkeypatch.setattr(owner, moment, kill)
    with pytest.raises(Killed):
        strange(harness)
    monkeypatch.undo()
    again = harness.restart()
    again.sleepless()
    while again.trainer.run_once():
        pass
    assert not again.shared_state.paused
    assert differs_by(again.weights(), harness.best) == 0  # type: ignore[attr-defined]
    trained = Counter(turn for row in again.ledger for turn in row.turns)
    assert set(trained.values()) == {1}
    assert {name for name, code in again.session_codes().items() if code != "trained"} == set()
    assert again.gateway.announced[-1]["version"] == again.trainer.version
    assert len(again.door().get("/rollback").json()["recoveries"]) == 1


def test_a_stop_between_an_alarm_and_the_recovery_makes_no_bad_weights_last(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is told to stop while it waits for the gateway, or for Redis, to give a new number."""
    reserve = harness.trainer.publisher.reserve

    def stops_at_the_second(version: int) -> int:
        if version > 4:
            raise Stopped
        return reserve(version)

    harness.agents.group("strange", [1.0, 0.0], version=3, logprobs=STRANGE)
    monkeypatch.setattr(harness.trainer.publisher, "reserve", stops_at_the_second)
    monkeypatch.setattr(harness.trainer, "start", lambda: None)
    harness.trainer.run()
    assert [row.step for row in harness.ledger] == [1, 2, 3]
    harness.shared_state.pause()
    again = harness.restart()
    assert again.trainer.run_once()
    assert differs_by(again.weights(), harness.best) == 0  # type: ignore[attr-defined]
    assert again.session_codes()["strange-0"] == "trained"


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_stop_between_an_alarm_that_holds_and_the_recovery_lets_a_resume_publish_nothing_bad(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """The training is held at the best version all the same, when it starts again."""
    harness = make_harness(guards={"reward_groups": 2, "max_recoveries": 0}).start()
    first = harness.weights()
    good(harness, 0.75)
    for name, reward, version in (("b", 0.75, 0), ("c", 0.0, 1), ("d", 0.0, 1)):
        harness.agents.group(name, [reward, reward], version=version)

    def stops(_: int) -> int:
        raise Stopped

    monkeypatch.setattr(harness.trainer.publisher, "reserve", stops)
    monkeypatch.setattr(harness.trainer, "start", lambda: None)
    harness.trainer.run()
    assert differs_by(harness.weights(), first) > 0
    for _ in range(restarts):
        harness = harness.restart()
        harness.sleepless()
        assert not harness.trainer.run_once()
    assert harness.shared_state.paused
    assert harness.gateway.announced_versions == [1]
    harness.door().post("/resume")
    harness.trainer.run_once()
    assert differs_by(harness.weights(), first) == 0
    published = [1, harness.trainer.version]
    assert harness.gateway.announced_versions == published
    assert [each["restored"] for each in harness.door().get("/rollback").json()["recoveries"]] == [0]
    assert not harness.shared_state.paused, "the alarm does not come twice"


def test_huge_rewards_are_in_a_checkpoint_that_can_be_read(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways of older releases stored them."""
    monkeypatch.setattr("tests.support.queue.memory_stream.check_rewards", lambda rewards: None)
    harness = make_harness(guards=GUARDS).start()
    harness.agents.group("huge", [1.7e308, 1.7e308])
    for number, reward in enumerate((-1.7e308, 1.7e308)):
        harness.agents.evaluate(f"huge-{number}-evaluation", reward)
    good(harness, 0.5)
    again = harness.restart()
    assert again.trainer.step == 1
    good(again, 0.5)


def test_the_best_checkpoint_stays_while_others_go(make_harness: MakeHarness) -> None:
    harness = make_harness(guards=GUARDS, keep_checkpoints=2).start()
    for reward in (0.1, 0.2, 0.9, 0.3, 0.3, 0.3, 0.3):
        good(harness, reward)
    # Version 2 did best; 6 and 7 are the newest. Others may stay for their first score.
    kept = set(harness.checkpoints.versions())
    assert {0, 2, 6, 7} <= kept
    assert len(kept) <= 5


def test_guards_remember_rewards_over_a_restart(make_harness: MakeHarness) -> None:
    harness = make_harness(guards={"reward_groups": 2, "max_recoveries": 0}).start()
    for name in ("a", "b"):
        harness.agents.group(name, [1.0, 0.9])
        harness.trainer.run_once()
    harness = harness.restart()
    for name in ("c", "d"):
        harness.agents.group(name, [0.0, 0.0], version=harness.trainer.version)
        harness.trainer.run_once()
    harness.trainer.run_once()
    assert harness.shared_state.paused
    assert "is 0, and was 0.95 at best" in str(harness.trainer.hold.reason)


def test_a_group_that_waits_over_restarts_is_counted_once(make_harness: MakeHarness) -> None:
    harness = make_harness(guards={"reward_groups": 2, "max_recoveries": 0}, algorithm={"min_live_rows": 100})
    harness.start()
    harness.agents.group("good", [1.0, 0.9])
    harness.agents.group("bad", [0.1, 0.0])
    for _ in range(4):
        harness.trainer.run_once()
        harness.save()
        harness = harness.restart()
    harness.trainer.run_once()
    scores = harness.intake.rewards.by_version.best([0])
    assert scores is not None
    assert scores.sessions == 4
    assert not harness.shared_state.paused


def test_an_operator_goes_back_to_a_version_that_has_a_checkpoint(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = harness.shared_state.request_rollback

    def answered(version: int) -> Any:
        """The main thread answers at once."""
        asked = ask(version)
        harness.trainer.run_once()
        return asked

    monkeypatch.setattr(harness.shared_state, "request_rollback", answered)
    harness.sleepless()
    client = harness.door()
    versions = client.get("/rollback").json()["versions"]
    assert versions == sorted(harness.checkpoints.versions())
    assert 1 in versions
    refused = client.post("/rollback", json={"version": 77})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "version")
    assert "no checkpoint has version 77; these have one: 0, 1, " in refused.json()["error"]["message"]
    for body in ({}, {"version": "1"}, {"version": -1}, {"version": 1, "more": 2}):
        assert client.post("/rollback", json=body).status_code in (400, 422)
    done = client.post("/rollback", json={"version": 1})
    assert done.json() == {"version": 4, "restored": 1, "step": 3}
    assert differs_by(harness.weights(), harness.best) == 0  # type: ignore[attr-defined]
    assert harness.gateway.served == harness.trainer.version == 4
    (recovery,) = client.get("/rollback").json()["recoveries"]
    assert not recovery["automatic"]
    good(harness, 0.5)


def test_a_held_training_that_an_operator_sets_back_waits_for_its_resume(make_harness: MakeHarness) -> None:
    harness = make_harness(guards=GUARDS | {"max_recoveries": 0}).start()
    good(harness, 0.1)
    good(harness, 0.9)
    strange(harness)
    assert harness.shared_state.paused
    asked = harness.shared_state.request_rollback(1)
    harness.sleepless()
    harness.trainer.run_once()
    asked.result(0)
    assert harness.shared_state.paused
    assert harness.waits_for == "POST /resume"
    assert not harness.restart().shared_state.paused, "no reason holds it any more"


@pytest.mark.parametrize("traffic", ["record", "discard", "refuse"])
def test_a_paused_trainer_reads_on(make_harness: MakeHarness, traffic: str) -> None:
    """Otherwise the stream would fill up Redis. Evaluations count meanwhile, and gateways hear whether it
    refuses new sessions."""
    harness = make_harness(paused_traffic=traffic).start()
    harness.sleepless()
    assert harness.stream.trainer["refuses_training"] == "false"
    harness.shared_state.pause()
    harness.agents.evaluate("evaluation", 0.5)
    harness.agents.group("flat", [1.0, 1.0])
    harness.agents.group("live", [1.0, 0.0])
    for _ in range(2):
        assert not harness.trainer.run_once()
    assert harness.stream.trainer["refuses_training"] == ("true" if traffic == "refuse" else "false")
    codes = harness.session_codes()
    assert (codes["evaluation"], codes["flat-0"]) == ("not_for_training", "zero_advantage")
    assert harness.shared_state.snapshot.evaluations["eval/0/reward"] == 0.5
    assert codes["live-0"] == ("not_for_training" if traffic == "discard" else None)
    harness.shared_state.resume()
    assert harness.trainer.run_once() == (traffic != "discard")


@pytest.mark.numeric
@pytest.mark.parametrize(
    "options",
    cases(
        [{"zero_stage": 1}, {"zero_stage": 2, "dtype": "bfloat16"}, {"lora": {"rank": 4}}],
        long=[
            {"zero_stage": 0},
            {"zero_stage": 3},
            {"zero_stage": 2},
            {"zero_stage": 2, "offload_optimizer": True},
        ],
    ),
    ids=str,
)
def test_weights_optimizer_and_schedule_are_those_of_the_checkpoint(
    make_learner: MakeLearner, tmp_path: Path, options: dict[str, Any]
) -> None:
    schedule = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "total_steps": 9}
    went, never = (make_learner(optimizer=schedule, **options) for _ in range(2))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    for learner in (went, never):
        learner.learn(1)
    saved_checkpoint(checkpoints, went.leader, RunState(step=1, version=1))
    went.learn(2)
    went.learn(3)
    checkpoints.load(went.leader, 1, rate_scale=1.0)
    told = [learner.learn(4) for learner in (went, never)]
    assert told[0] == told[1]
    assert told[0]["learning_rate"] == pytest.approx(1e-2), "the second step ends the warm-up"
    assert differs_by(went.exported(), never.exported()) == 0
