"""Which tasks a run plays: in what order, how often, and which it leaves out."""

from collections import Counter

from environments.runs.task_order import TaskOrder
from environments.task import task_id
from tests.support.environments.nothing import NoEnvironments


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
