"""The experiments' own environments give the rewards that the page says."""

import itertools
import json
from typing import Any

import pytest

from results.environments.colours import COLOURS, SPREAD, Colours
from results.environments.countdown import Countdown, puzzles, reward_of, value_of
from results.environments.errands import CALLS, Errands
from results.environments.lookup import Lookup
from weir.demo.extraction import NAMES


def test_each_puzzle_has_a_solution_and_none_is_in_both_parts() -> None:
    known, held_out = puzzles(held_out=False), puzzles(held_out=True)
    for puzzle in (*known, *held_out):
        assert reward_of(puzzle.numbers, puzzle.target, puzzle.expression) == 1.0
    questions = [each.question for each in (*known, *held_out)]
    assert len(set(questions)) == len(questions)
    assert (len(known), len(held_out)) == (293, 74)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", 7),
        ("2*3+1", 7),
        ("9-2-3", 4),
        ("2*3*4", 24),
        ("2 + 3 * 4", 14),
        ("1+2", None),
        ("a+b*c", None),
    ],
)
def test_products_come_before_sums(expression: str, value: int | None) -> None:
    assert value_of(expression) == value


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("1+2+3", 1.0), ("3+2+1", 1.0), ("1*2*3", 1.0), ("1+2*3", 0.1), ("1+1+4", 0.0), ("6", 0.0), ("", 0.0)],
)
def test_a_right_use_of_the_numbers_is_worth_a_tenth(answer: str, reward: float) -> None:
    environment = Countdown()
    environment.reset({"question": "use 1 2 3 to make 6", "numbers": [1, 2, 3], "target": 6})
    assert environment.step(answer) == (None, reward, True, False, {})


def fetched(items: str, credit: str) -> list[Any]:
    """The rewards of the calls, and of the end, if the first items are asked for in alphabetical order."""
    environment = Errands(credit)
    environment.reset({"items": "abcd"})
    return [environment.fetch(each)[1:3] for each in items]


def test_a_call_earns_where_it_is_made_or_all_of_them_at_the_end() -> None:
    assert fetched("axcd", "turn") == [(0.25, False), (0.0, False), (0.25, False), (0.25, True)]
    assert fetched("axcd", "episode") == [(None, False), (None, False), (None, False), (0.75, True)]
    assert CALLS == 4


def test_an_answer_without_a_call_ends_an_errand_with_what_it_earned() -> None:
    environment = Errands("episode")
    environment.reset({"items": "abcd"})
    environment.fetch("a")
    assert environment.step("done")[1:3] == (0.25, True)


def test_colours_are_near_those_of_their_names() -> None:
    for task in itertools.islice(Colours().tasks(0), 50):
        near = COLOURS[task["name"]]
        assert all(abs(a - b) <= SPREAD for a, b in zip(task["rgb"], near, strict=True))
        environment = Colours()
        environment.reset(task)
        assert [environment.step(name)[1] for name in (task["name"], "pink")] == [1.0, 0.0]


def test_a_hidden_colour_is_always_the_same_image() -> None:
    tasks = [*itertools.islice(Colours().tasks(0), 2)]
    shown, hidden = ([str(Colours(shown).reset(task)) for task in tasks] for shown in (True, False))
    assert shown[0] != shown[1]
    assert hidden[0] == hidden[1]


def test_the_register_answers_a_right_call_and_each_right_answer_is_worth_a_half() -> None:
    asked = Lookup().reset({"seed": 7})[-1]["content"]
    environment = Lookup()
    environment.reset({"seed": 7})
    name = next(each for each in NAMES if each in asked)
    heard, reward, ended, *_ = environment.step(json.dumps({"look": name}))
    assert (reward, ended) == (0.5, False)
    known = json.loads(heard or "")
    key = "age" if asked.startswith("How old") else "city"
    assert environment.step(json.dumps({key: known[key]})) == (None, 0.5, True, False, {})


@pytest.mark.parametrize("answer", ["", "[", '{"look": "Nobody"}', '{"age": 30}', "look"])
def test_a_wrong_call_ends_with_nothing(answer: str) -> None:
    environment = Lookup()
    environment.reset({"seed": 7})
    assert environment.step(answer) == (None, 0.0, True, False, {})
