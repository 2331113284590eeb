"""Parts of a run: which tasks are played, how an episode ends, pauses, and what is claimed and drawn."""

import asyncio
from collections import Counter
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from environments.agents import LoopedEpisodes
from environments.environment import Step, Task
from environments.episodes import EpisodePlayer, Seat
from environments.intervals import mean_interval, paired_difference, pass_at_k, wilson
from environments.results import draw, draw_evaluations
from environments.session_client import LONGEST_PAUSE_S, pause_after
from environments.task_ids import task_id
from environments.task_order import TaskOrder
from tests.support.environments.nothing import NoEnvironments

# Which tasks a run plays: in what order, how often, and which it leaves out


async def drawn(order: TaskOrder, count: int) -> list[str]:
    found = [await order.next() for _ in range(count)]
    return [each[1].id if each else "end" for each in found]


async def test_each_round_has_every_task_in_another_order() -> None:
    order = TaskOrder(NoEnvironments(10), seed=3, size=10)
    first, second = await drawn(order, 10), await drawn(order, 10)
    assert sorted(first) == sorted(second) == [f"3:{number}" for number in range(10)]
    assert first != second
    resumed = TaskOrder(NoEnvironments(10), seed=3, size=10, visit=10)
    assert await drawn(resumed, 10) == second


async def test_an_evaluation_plays_each_task_once() -> None:
    order = TaskOrder(NoEnvironments(10), seed=0, size=4, once=True)
    assert await drawn(order, 6) == ["0:0", "0:1", "0:2", "0:3", "end", "end"]


async def test_a_source_may_end_before_its_size() -> None:
    order = TaskOrder(NoEnvironments(10), seed=0, size=0)
    assert (await drawn(order, 12))[9:] == ["0:9", "end", "end"]


async def test_tasks_that_teach_nothing_are_left_out_and_tried_again() -> None:
    order = TaskOrder(NoEnvironments(10), seed=0, size=2, skip_after=2)
    counts: Counter[str] = Counter()
    for _ in range(12):
        (name,) = await drawn(order, 1)
        counts[name] += 1
        order.saw(name, [1.0, 1.0] if name == "0:0" else [0.0, 1.0])
    assert counts["0:1"] > counts["0:0"] >= 3
    assert order.skipped > 0
    order.saw("0:0", [0.0, 1.0])  # it teaches again
    assert Counter(await drawn(order, 6)) == {"0:0": 3, "0:1": 3}


def test_ids_of_tasks_are_what_the_gateway_accepts() -> None:
    assert task_id("python:a.b:C", 3, 4) == "python:a.b:C:3:4"
    odd, other = task_id("games", "ä b"), task_id("games", "ö b")
    assert odd != other
    assert odd.isascii()
    assert " " not in odd
    assert len(task_id("x" * 500)) <= 200


# An episode has one outcome, also when it is cancelled in the moment in which it ends


SEATS = [Seat(f"s{number}", {}, "policy", {}) for number in range(2)]


class SlowGateway:
    """Stands in for SessionClient; it stores an outcome when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        self.stored: list[tuple[str, str]] = []

    def model_client(self, session: Any) -> None: ...

    async def finish(self, session_id: str, status: str, *_: Any) -> None:
        self.asked.set()
        await self.go_on.wait()
        self.stored.append((session_id, status))


async def ends(*_: Any) -> Step:
    return Step(terminated=True)


async def test_an_episode_that_is_cancelled_while_it_ends_has_ended() -> None:
    gateway: Any = SlowGateway()
    looped = LoopedEpisodes(
        gateway, NoEnvironments(), ends, max_turns=1, time_limit_s=60, graded_elsewhere=True
    )
    player = EpisodePlayer(gateway, looped.play)
    playing = asyncio.create_task(player.play(Task("t", {}), SEATS, [{}, {}]))
    await gateway.asked.wait()
    playing.cancel()
    await asyncio.sleep(0)  # the cancellation arrives
    gateway.go_on.set()
    assert [each.status for each in await playing] == ["completed", "completed"]
    assert gateway.stored == [("s0", "completed"), ("s1", "completed")]


# How long the runner pauses when the gateway refuses it


def test_the_gateways_wish_is_obeyed_however_often_it_was_told() -> None:
    for attempt in range(50):
        assert 2.0 <= pause_after(attempt, wished_s=2.0) <= 2.5


def test_without_a_wish_the_pauses_grow_to_a_bound() -> None:
    assert pause_after(0) < pause_after(5) <= pause_after(50) * 2 <= LONGEST_PAUSE_S * 2


# What an evaluation may claim, against closed forms and simulation


@pytest.mark.parametrize(("count", "passed", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 6), (4, 3, 2)])
def test_pass_at_k_is_the_share_of_samples_of_k_with_one_that_passes(count: int, passed: int, k: int) -> None:
    chosen = list(combinations([True] * passed + [False] * (count - passed), k))
    assert pass_at_k(count, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_pass_at_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 samples"):
        pass_at_k(2, 1, 3)


def test_wilson_is_the_root_of_its_equation() -> None:
    for passed, count in ((0, 5), (3, 10), (10, 10), (1, 1000)):
        for bound in wilson(passed, count):
            variance = bound * (1 - bound) / count
            assert (bound - passed / count) ** 2 == pytest.approx(1.959964**2 * variance, abs=1e-9)


def test_the_interval_of_tasks_covers_as_often_as_it_says() -> None:
    """Of 500 intervals at 95 %, between 456 and 494 cover: 4 standard deviations of a binomial."""
    random, covered = Random(0), 0
    for _ in range(500):
        levels = [random.gauss(0.3, 1.0) for _ in range(200)]
        rewards = {str(n): [random.gauss(level, 0.5) for _ in range(4)] for n, level in enumerate(levels)}
        _, low, high = mean_interval(rewards)
        covered += low <= 0.3 <= high
    assert 456 <= covered <= 494


def test_a_comparison_is_paired_by_task() -> None:
    one = {str(n): [float(n)] for n in range(50)}
    other = {str(n): [n + 0.5] for n in range(40)}
    mean, low, high, count = paired_difference(one, other)
    assert (mean, low, high, count) == (0.5, 0.5, 0.5, 40)
    with pytest.raises(ValueError, match="no task in common"):
        paired_difference(one, {"x": [1.0]})


# The pictures of a run; without rewards there is none


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
