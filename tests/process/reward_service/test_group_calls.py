"""A grader behind a URL grades all sessions of a group in one call, when none of them is open any more."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.gateway.running import RunningGateway
from tests.support.reward_service.running import RunningRewards, reward_service
from tests.support.reward_service.scripted_grader import ScriptedGrader
from tests.support.reward_service.sessions import (
    QUICK,
    READINGS,
    answered,
    finished,
    group_of,
    opened_group,
    reward_of,
    two_more_readings,
    values_of,
    wait_for,
)
from tests.support.serving import serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

Body = dict[str, Any]


@contextmanager
def grading(
    gateway: RunningGateway, answer: Callable[[Body], list[Body]], *more: Body, **rule: Any
) -> Iterator[tuple[RunningRewards, ScriptedGrader]]:
    """A reward service whose first rule posts groups; `answer` gives the rewards of a call."""
    grader = ScriptedGrader(lambda body: json.dumps({"rewards": answer(body)}).encode())
    with serving(grader) as url:
        given = {"name": "remote", "kind": "http", "per": "group", "url": url, "backoff_s": 0.02, **rule}
        with reward_service(gateway_url=gateway.url, rules=[given, *more], dispatch=QUICK) as rewards:
            yield rewards, grader


def asked(body: Body) -> dict[str, Body]:
    """The sessions of a call, by their ids."""
    return {each["session_id"]: each for each in body["sessions"]}


def by_length(body: Body) -> list[Body]:
    return [
        {"session_id": each["session_id"], "value": each["turns"][-1]["message"]["content"].count("x")}
        for each in body["sessions"]
    ]


def test_one_call_has_all_sessions_of_a_group_and_each_gets_its_reward(gateway: RunningGateway) -> None:
    sessions, single = group_of(gateway, "x", "xxx", "xx"), finished(gateway, "alone")
    others = {"name": "single", "kind": "python", "source": "def grade(sample, item): return -1.0"}
    with grading(gateway, by_length, others, rubric="Be long.", api_key="hush") as (_, grader):
        found = [reward_of(gateway, each) for each in sessions]
        assert reward_of(gateway, single)["key"] == "single"
    assert [reward["value"] for reward in found] == [1, 3, 2]
    assert {(reward["key"], reward["source"]) for reward in found} == {("remote", "http:remote")}
    (body,) = grader.bodies
    group_id = body["sessions"][0]["group_id"]
    assert (body["kind"], body["key"], body["rubric"], body["attempt"]) == ("group", "remote", "Be long.", 1)
    assert asked(body).keys() == {*sessions}
    assert grader.headers[0]["idempotency-key"] == f"group/{group_id}/remote"
    assert grader.headers[0]["authorization"] == "Bearer hush"


def test_nobody_is_asked_while_a_session_is_open_and_failed_ones_are_left_out(
    gateway: RunningGateway,
) -> None:
    """Also if the sessions live shorter than the rule's `before_expiry_s`, which is 300."""
    first, second, third = opened_group(gateway, 3, ttl_s=200)
    answered(gateway, first, "x")
    answered(gateway, second, "xx", "failed")
    with grading(gateway, by_length) as (rewards, grader):
        wait_until(lambda: rewards.metric(READINGS) >= 4)
        assert grader.bodies == []
        answered(gateway, third, "xxx")
        assert [reward_of(gateway, each)["value"] for each in (third, first)] == [3, 1]
    assert asked(grader.bodies[0]).keys() == {first, third}


def test_null_is_no_opinion_on_one_session_and_is_not_asked_again(gateway: RunningGateway) -> None:
    first, second = group_of(gateway, "x", "xx")

    def answer(body: Body) -> list[Body]:
        (turn,) = asked(body)[first]["turn_ids"]
        given: list[Body] = [{"session_id": first, "value": 0.5, "turn_id": turn}]
        return [{"session_id": second, "value": None}, *given]

    with grading(gateway, answer) as (rewards, grader):
        reward = reward_of(gateway, first)
        wait_for(rewards, "remote", "no_opinion")
        two_more_readings(rewards)
        assert len(grader.bodies) == 1
    assert reward["turn_id"] == asked(grader.bodies[0])[first]["turn_ids"][0]
    assert values_of(gateway, second) == []


@pytest.mark.parametrize("dead", [False, True])
def test_a_straggler_is_graded_after_no_opinion_and_after_a_dead_letter(
    turned: TurnedClock, own_gateway: RunningGateway, dead: bool
) -> None:
    gateway = own_gateway
    first, straggler = opened_group(gateway, 2, ttl_s=2000)
    answered(gateway, first, "x")

    def answer(body: Body) -> list[Body]:
        if dead and len(body["sessions"]) == 1:
            return []
        return [
            {**each, "value": each["value"] if each["session_id"] == straggler else None}
            for each in by_length(body)
        ]

    with grading(gateway, answer, attempts=1, before_expiry_s=10_000) as (rewards, grader):
        turned.turn(1100)  # more than half of its life: it is graded early, without the straggler
        wait_for(rewards, "remote", "dead_letter" if dead else "no_opinion")
        answered(gateway, straggler, "xx")
        assert reward_of(gateway, straggler)["value"] == 2
        two_more_readings(rewards)
        assert len(grader.bodies) == 2


SPOILT: dict[str, Callable[[list[Body]], list[Body]]] = {
    "the answer has no reward of 1 sessions": lambda given: given[:1],
    "the answer has 3 rewards of 2 sessions": lambda given: [*given, given[0]],
    "rewards another session: 'other'": lambda given: [*given, {"session_id": "other", "value": 1}],
    "the session has no turn 'no-turn'": lambda given: [{**given[0], "turn_id": "no-turn"}, given[1]],
    "the answer has no rewards": lambda given: [],
}


def test_an_answer_that_does_not_fit_the_group_rewards_nobody(gateway: RunningGateway) -> None:
    groups = {reason: group_of(gateway, "x", "xx") for reason in SPOILT}

    def answer(body: Body) -> list[Body]:
        (reason,) = (each for each, members in groups.items() if members[0] in asked(body))
        return SPOILT[reason](by_length(body))

    with grading(gateway, answer, attempts=2) as (rewards, grader):
        wait_for(rewards, "remote", "dead_letter", len(groups))
        letters = {each["unit"]: each["reason"] for each in rewards.get("/status").json()["dead_letters"]}
    for reason, members in groups.items():
        calls = [body for body in grader.bodies if members[0] in asked(body)]
        assert [body["attempt"] for body in calls] == [1, 2], reason
        assert reason in letters[f"group/{calls[0]['sessions'][0]['group_id']}"]
        assert [values_of(gateway, each) for each in members] == [[], []]


def test_a_group_of_which_a_part_was_rewarded_is_finished(gateway: RunningGateway) -> None:
    first, second = group_of(gateway, "x", "xx")
    gateway.post(f"/sessions/{first}/reward", {"value": 0.9, "key": "remote"})
    with grading(gateway, by_length) as (_, grader):
        assert reward_of(gateway, second)["value"] == 2
    assert asked(grader.bodies[0]).keys() == {first, second}
    assert values_of(gateway, first) == [0.9]
