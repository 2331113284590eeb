"""A grader behind a URL grades all sessions of a group in one call, when none of them is open any more."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.reward_service.running import RunningRewards, reward_service
from tests.support.reward_service.scripted_grader import ScriptedGrader
from tests.support.serving import serving
from tests.support.waiting import wait_until

QUICK = {"poll_every_s": 0.05, "backoff_limit_s": 0.1}
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


def answered(gateway: RunningGateway, session_id: str, answer: str, status: str = "completed") -> None:
    gateway.engine.script.append(answer)
    assert gateway.chat("question", f"/sessions/{session_id}/v1/chat/completions").status_code == 200
    gateway.post(f"/sessions/{session_id}/finish", {"status": status})


def group_of(gateway: RunningGateway, *answers: str) -> list[str]:
    """A group whose sessions gave these answers, and are finished."""
    members = gateway.post("/groups", {"size": len(answers)}).json()["sessions"]
    for member, answer in zip(members, answers, strict=True):
        answered(gateway, member["session_id"], answer)
    return [member["session_id"] for member in members]


def rewards_of(gateway: RunningGateway, session_id: str) -> list[Body]:
    found: list[Body] = gateway.get(f"/sessions/{session_id}", key=ADMIN_KEY).json()["rewards"]
    return found


def asked(body: Body) -> dict[str, Body]:
    """The sessions of a call, by their ids."""
    return {each["session_id"]: each for each in body["sessions"]}


def by_length(body: Body) -> list[Body]:
    return [
        {"session_id": each["session_id"], "value": each["turns"][-1]["message"]["content"].count("x")}
        for each in body["sessions"]
    ]


def test_one_call_has_all_sessions_of_a_group_and_each_gets_its_reward(gateway: RunningGateway) -> None:
    sessions = group_of(gateway, "x", "xxx", "xx")
    single = gateway.session()["session_id"]
    answered(gateway, single, "alone")
    others = {"name": "single", "kind": "python", "source": "def grade(sample, item): return -1.0"}
    with grading(gateway, by_length, others, rubric="Be long.", api_key="hush") as (_, grader):
        found = [wait_until(lambda: rewards_of(gateway, each))[0] for each in sessions]  # noqa: B023
        assert wait_until(lambda: rewards_of(gateway, single))[0]["key"] == "single"
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
    members = gateway.post("/groups", {"size": 3}).json()["sessions"]
    first, second, third = (member["session_id"] for member in members)
    answered(gateway, first, "x")
    answered(gateway, second, "xx", "failed")
    with grading(gateway, by_length) as (rewards, grader):
        name = 'weir_rewards_list_readings_total{outcome="read"}'
        wait_until(lambda: rewards.metric(name) >= 4)
        assert grader.bodies == []
        answered(gateway, third, "xxx")
        assert wait_until(lambda: rewards_of(gateway, third))[0]["value"] == 3
        assert wait_until(lambda: rewards_of(gateway, first))[0]["value"] == 1
    assert asked(grader.bodies[0]).keys() == {first, third}


def test_sessions_with_a_short_life_are_graded_together_as_well(gateway: RunningGateway) -> None:
    members = gateway.post("/groups", {"size": 3, "ttl_s": 200}).json()["sessions"]
    first, *others = (member["session_id"] for member in members)
    answered(gateway, first, "x")
    with grading(gateway, by_length) as (rewards, grader):  # before_expiry_s is 300
        name = 'weir_rewards_list_readings_total{outcome="read"}'
        wait_until(lambda: rewards.metric(name) >= 4)
        assert grader.bodies == []
        for each in others:
            answered(gateway, each, "xx")
        assert wait_until(lambda: rewards_of(gateway, others[1]))[0]["value"] == 2
    assert asked(grader.bodies[0]).keys() == {first, *others}


def test_null_is_no_opinion_on_one_session_and_is_not_asked_again(gateway: RunningGateway) -> None:
    first, second = group_of(gateway, "x", "xx")

    def answer(body: Body) -> list[Body]:
        (turn,) = asked(body)[first]["turn_ids"]
        given: list[Body] = [{"session_id": first, "value": 0.5, "turn_id": turn}]
        return [{"session_id": second, "value": None}, *given]

    with grading(gateway, answer) as (rewards, grader):
        (reward,) = wait_until(lambda: rewards_of(gateway, first))
        wait_until(
            lambda: rewards.metric('weir_rewards_sessions_total{outcome="no_opinion",rule="remote"}') == 1
        )
        name = 'weir_rewards_list_readings_total{outcome="read"}'
        before = rewards.metric(name)
        wait_until(lambda: rewards.metric(name) >= before + 3)
        assert len(grader.bodies) == 1
    assert reward["turn_id"] == asked(grader.bodies[0])[first]["turn_ids"][0]
    assert rewards_of(gateway, second) == []


@pytest.mark.parametrize("dead", [False, True])
def test_a_straggler_is_graded_after_no_opinion_and_after_a_dead_letter(
    gateway: RunningGateway, dead: bool
) -> None:
    members = gateway.post("/groups", {"size": 2, "ttl_s": 20}).json()["sessions"]
    first, straggler = (member["session_id"] for member in members)
    answered(gateway, first, "x")

    def answer(body: Body) -> list[Body]:
        if dead and len(body["sessions"]) == 1:
            return []
        return [
            {**each, "value": each["value"] if each["session_id"] == straggler else None}
            for each in by_length(body)
        ]

    with grading(gateway, answer, attempts=1) as (rewards, grader):
        outcome = "dead_letter" if dead else "no_opinion"
        name = f'weir_rewards_sessions_total{{outcome="{outcome}",rule="remote"}}'
        wait_until(lambda: rewards.metric(name) == 1)  # graded early, without the straggler
        answered(gateway, straggler, "xx")
        assert wait_until(lambda: rewards_of(gateway, straggler))[0]["value"] == 2
        readings = 'weir_rewards_list_readings_total{outcome="read"}'
        before = rewards.metric(readings)
        wait_until(lambda: rewards.metric(readings) >= before + 3)
        assert len(grader.bodies) == 2


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda given: given[:1], "the answer has no reward of 1 sessions"),
        (lambda given: [*given, given[0]], "the answer has 3 rewards of 2 sessions"),
        (lambda given: [*given, {"session_id": "other", "value": 1}], "rewards another session: 'other'"),
        (lambda given: [{**given[0], "turn_id": "no-turn"}, given[1]], "the session has no turn 'no-turn'"),
        (lambda given: [], "the answer has no rewards"),
    ],
)
def test_an_answer_that_does_not_fit_the_group_rewards_nobody(
    gateway: RunningGateway, spoil: Callable[[list[Body]], list[Body]], reason: str
) -> None:
    sessions = group_of(gateway, "x", "xx")
    with grading(gateway, lambda body: spoil(by_length(body)), attempts=2) as (rewards, grader):
        (letter,) = wait_until(lambda: rewards.get("/status").json()["dead_letters"])
    assert reason in letter["reason"]
    assert [body["attempt"] for body in grader.bodies] == [1, 2]
    assert [rewards_of(gateway, each) for each in sessions] == [[], []]


def test_a_group_of_which_a_part_was_rewarded_is_finished(gateway: RunningGateway) -> None:
    first, second = group_of(gateway, "x", "xx")
    gateway.post(f"/sessions/{first}/reward", {"value": 0.9, "key": "remote"})
    with grading(gateway, by_length) as (_, grader):
        assert wait_until(lambda: rewards_of(gateway, second))[0]["value"] == 2
    assert asked(grader.bodies[0]).keys() == {first, second}
    assert [reward["value"] for reward in rewards_of(gateway, first)] == [0.9]
