"""The guard of the reward compares each task with itself, whatever the others do."""

import random
import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hypothesis_profiles import examples
from trainer_service.groups.guards import Guards, GuardState
from trainer_service.groups.reward_guard import Alarm, EvaluationReward, GroupReward, source_of
from trainer_service.settings import GuardSettings

WINDOW = GuardSettings().reward_groups
FEW = 4
"""How many groups the properties compare, so that short sequences are enough."""
ONCE = "reasoning_gym:sums:7"
"""The source of tasks that never repeat."""
TASKS_SEEN = 20_000
"""Of a million; each further one is like these."""
TASKS = [None, "value-of-c", "value-of-d", "python:games:Guess:3", "17", ONCE, "maths/train"]


def groups_of(task: str | None, rewards: Sequence[float]) -> list[GroupReward]:
    """The groups of one task, or of the tasks of the source ONCE."""
    return [
        GroupReward(f"{task}:{number}" if task == ONCE else task, reward)
        for number, reward in enumerate(rewards)
    ]


def alarms(groups: Sequence[GroupReward], window: int = WINDOW) -> list[tuple[int, Alarm]]:
    """The alarms, with the number of the group that raised each."""
    guards = Guards(GuardSettings(reward_groups=window))
    heard = ((at, guards.check_rewards([group])) for at, group in enumerate(groups))
    return [(at, alarm) for at, alarm in heard if alarm is not None]


def steady(task: str | None, rewards: Sequence[float]) -> list[GroupReward]:
    """The groups up to the first alarm that they raise alone."""
    groups = groups_of(task, rewards)
    heard = alarms(groups, FEW)
    return groups[: heard[0][0]] if heard else groups


def is_about(alarm: Alarm, task: str | None) -> bool:
    if task == ONCE:
        return alarm.source == source_of(f"{ONCE}:0")
    return alarm.task_id == task and (task is not None or alarm.source is None)


@st.composite
def courses(draw: st.DrawFn) -> list[float]:
    """Rewards that stay at a level for a while, then at another one."""
    levels = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, -1.0])
    lengths = st.integers(1, 4 * FEW)
    blocks = draw(st.lists(st.tuples(levels, lengths, st.sampled_from([0.0, 0.05])), max_size=5))
    return [level + noise * (-1) ** at for level, length, noise in blocks for at in range(length)]


def mixed(groups: Sequence[list[GroupReward]], draw: st.DataObject) -> list[GroupReward]:
    """All groups in an order in which those of each task keep theirs."""
    order = draw.draw(st.permutations([at for at, each in enumerate(groups) for _ in each]))
    left = [iter(each) for each in groups]
    return [next(left[at]) for at in order]


@settings(max_examples=examples(200))
@given(st.lists(courses(), min_size=2, max_size=len(TASKS)), st.data())
def test_tasks_that_alone_raise_no_alarm_raise_none_in_any_order(
    given_courses: list[list[float]], draw: st.DataObject
) -> None:
    """One after the other is such an order."""
    groups = [steady(task, rewards) for task, rewards in zip(TASKS, given_courses, strict=False)]
    assert not alarms([group for each in groups for group in each], FEW)
    assert not alarms(mixed(groups, draw), FEW)


@settings(max_examples=examples(200))
@given(st.sampled_from(TASKS), st.lists(courses(), max_size=4), st.data())
def test_a_collapse_of_one_task_raises_an_alarm_whatever_the_others_do(
    task: str | None, given_courses: list[list[float]], draw: st.DataObject
) -> None:
    """Within as many of its groups as are compared, although others collapse as well, and again and again."""
    others = [each for each in TASKS if each != task]
    groups = [groups_of(*each) for each in zip(others, given_courses, strict=False)]
    good = draw.draw(st.integers(2 * FEW, 4 * FEW))
    own = groups_of(task, [1.0] * good + [0.0] * FEW)
    heard = alarms(mixed([own, *groups], draw), FEW)
    assert len([alarm for _, alarm in heard if is_about(alarm, task)]) == 1


@pytest.mark.parametrize(
    ("task_id", "source"),
    [
        ("reasoning_gym:chain_sum:7:13", "reasoning_gym:chain_sum"),
        ("python:games:Guess:0:1", "python:games:Guess"),
        ("openenv:echo:train:4", "openenv:echo:train"),
        ("gsm8k:17", "gsm8k"),
        ("math500:test:0-9f3c2ab01d77", "math500:test"),
        ("value-of-c", "value-of"),
        ("sums_18", "sums"),
        ("tool", ""),
        ("17", ""),
        ("3f2b8c1e-41d4-4e29-a716-446655440000", ""),
        ("deadbeef-17", ""),
        ("-:-", ""),
    ],
)
def test_the_source_of_a_task_is_what_its_id_shares_with_others(task_id: str, source: str) -> None:
    assert source_of(task_id) == source


def learned(tasks: int, groups: int, seed: int = 0) -> list[GroupReward]:
    """Groups of many tasks in random order, which the policy has learned; about one in ten fails."""
    draw = random.Random(seed)
    return [
        GroupReward(f"value-of-{draw.randrange(tasks)}", float(draw.random() > 0.1)) for _ in range(groups)
    ]


def test_the_best_groups_and_the_last_groups_have_none_in_common() -> None:
    guards = Guards(GuardSettings(reward_groups=50))
    rewards = [0.0] * 5 + [8.0] * 45 + [8.0] * 5 + [0.0] * 45
    heard = [guards.check_rewards([GroupReward("task", reward)]) for reward in rewards]
    assert not any(heard[:-1])
    assert "of the last 50 groups of task task is 0.8, and was 7.2 at best" in heard[-1].reason  # type: ignore[union-attr]


@pytest.mark.parametrize("tasks", [10, 1000, 10**9])
def test_a_collapse_of_many_tasks_of_a_source_is_seen_long_before_that_of_each(tasks: int) -> None:
    """With ten, each has so few groups that its own series tells nothing yet."""
    good = learned(tasks, 3 * WINDOW)
    assert not alarms(good)
    ((at, alarm), *_) = alarms(good + [each._replace(reward=0.0) for each in learned(tasks, WINDOW, seed=1)])
    assert at < 4 * WINDOW
    assert (alarm.task_id, alarm.source) == (None, "value-of")
    assert f"the mean reward of the last {WINDOW} groups of tasks value-of… is " in alarm.reason


def test_harder_tasks_of_a_source_are_no_collapse() -> None:
    """A curriculum, say: of 20 tasks the first ones are always solved, the others rarely."""
    draw = random.Random(0)
    order = [*range(10)] * 8 + [*range(20)] * 4 + [*range(10, 20)] * 16
    groups = [GroupReward(f"step:{task}", float(task < 10 or draw.random() < 0.1)) for task in order]
    assert not alarms(groups)
    assert alarms([*groups, *(GroupReward(f"step:{task}", 0.0) for task in [*range(10)] * 4)]), "these are"


def test_evaluations_are_compared_by_the_tasks_that_both_versions_had() -> None:
    def heard(*versions: Sequence[tuple[str, float]]) -> Alarm | None:
        guards, sessions = Guards(GuardSettings()), enumerate(versions)
        evaluations = [
            EvaluationReward(task, version, reward) for version, had in sessions for task, reward in had
        ]
        return guards.check_rewards([], evaluations)

    easy, hard = [("easy", 1.0)] * WINDOW, [("hard", 0.0)] * WINDOW
    assert heard(easy, hard) is None
    assert heard(easy, [*easy, *hard]) is None
    assert heard([*easy, *hard], [*hard, *hard, ("easy", 1.0)]) is None
    assert heard(easy, hard, [(task, 0.0) for task, _ in easy]) is not None
    sets = [[(f"maths:{version}:{at}", 1.0 - version) for at in range(WINDOW)] for version in (0, 1)]
    assert heard(*sets) is not None, "its tasks never repeat"
    assert heard(sets[0], [(task.replace("maths", "poems"), 0.0) for task, _ in sets[1]]) is None


def test_a_million_tasks_take_bounded_memory_and_hide_no_collapse_of_another_one() -> None:
    guards = Guards(GuardSettings())
    assert guards.check_rewards([GroupReward("own", 1.0)] * 2 * WINDOW) is None
    tracemalloc.start()
    for at in range(TASKS_SEEN):  # half of them share no source with any other
        name = f"sums:{at}" if at % 2 else f"user{at}z:task:{at}"
        guards.check_rewards([GroupReward(name, float(at % 3 == 0))], [EvaluationReward(name, at, 0.5)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20
    assert len(msgspec.json.encode(guards.state)) < 4 * 2**20
    assert guards.check_rewards([GroupReward("own", 0.0)] * WINDOW) is not None


def test_what_a_checkpoint_without_tasks_knows_counts_for_sessions_without_a_task() -> None:
    old = GuardState(norms=[1.0] * 30, rewards=[0.8] * 2 * WINDOW, evaluated={3: [1.0] * WINDOW})
    stored = msgspec.json.decode(msgspec.json.encode(old), type=GuardState)
    for _ in range(2):  # the second time as this release stores it
        guards = Guards(GuardSettings())
        guards.resume(stored)
        stored = msgspec.json.decode(msgspec.json.encode(guards.state), type=GuardState)
    bad = [GroupReward("new", 0.0)] * WINDOW
    assert guards.check_rewards(bad) is None
    assert guards.check_rewards([], [EvaluationReward("new", 4, 0.0)] * WINDOW) is None
    assert guards.check_rewards([], [EvaluationReward(None, 4, 0.0)] * WINDOW) is not None
    assert guards.check_rewards([GroupReward(None, 0.0)] * WINDOW) is not None
    assert guards.check_step({"step": 31, "grad_norm": 1e3}) is not None
