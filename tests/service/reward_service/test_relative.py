"""A judge compares the sessions of a group in one prompt, and each gets its own score."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from reward_service.dispatch.session_graders import compare
from reward_service.judging import UnreadableVerdict
from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.reward_service.running import RunningRewards, reward_service
from tests.support.reward_service.scripted_judge import ScriptedOpenAi, ScriptedReply
from tests.support.reward_service.sessions import QUICK, READINGS, answered, group_of
from tests.support.serving import serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

TRANSCRIPTS = ["Sum 1 + 1.\nIt is two.", "Sum 1 + 1.\nIt is three.", "Sum 1 + 1.\nI do not know."]


def scores(*pairs: tuple[Any, float]) -> str:
    return json.dumps({"scores": [{"id": id_, "score": score} for id_, score in pairs]})


def test_what_all_attempts_begin_with_is_there_once() -> None:
    prompt = compare(TRANSCRIPTS, "Be right.", "s").messages[1]["content"]
    assert prompt.count("Sum 1 + 1.") == 1
    assert [prompt.count(text) for text in ("It is two.", "It is three.", "I do not know.")] == [1, 1, 1]
    same = compare(["a\nb", "a\nb"], "", "s").messages[1]["content"]
    assert same.count("a\n") == 1
    alone = compare(["a\nb"], "", "s").messages[1]["content"]
    assert "a\nb" in alone


def test_the_order_follows_the_seed_and_scores_return_to_their_attempts() -> None:
    orders = {tuple(compare(TRANSCRIPTS, "", str(seed)).order_N) for seed in range(50)}
    assert len(orders) == 6
    for seed in range(10):
        comparison = compare(TRANSCRIPTS, "", str(seed))
        assert comparison.order_N == compare(TRANSCRIPTS, "", str(seed)).order_N
        places = comparison.positions()
        prompt = comparison.messages[1]["content"]
        ends = [prompt.index(text.splitlines()[1]) for text in TRANSCRIPTS]
        assert sorted(range(3), key=lambda attempt: ends[attempt]) == list(comparison.order_N)
        answer = scores(*((str(place), place / 10) for place in places))
        assert comparison.read(answer) == [place / 10 for place in places]


def test_no_attempt_knows_the_tag_that_ends_its_part_of_the_prompt() -> None:
    """Neither from the seed, which is in a reward's source, nor from a former comparison."""

    def tag() -> str:
        prompt = compare(TRANSCRIPTS, "", "0/group/g-1/1").messages[1]["content"]
        found, *others = set(map(str, re.findall(r"<(attempt-[^ ]+) id=", prompt)))
        assert not others
        assert prompt.count(f"</{found}>") == len(TRANSCRIPTS)
        return found

    guessed = f"attempt-{hashlib.sha256(b'0/group/g-1/1').hexdigest()[:8]}"
    assert len({guessed, *(tag() for _ in range(20))}) == 21


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        '{"scores": []}',
        scores((1, 0.5), (2, 0.5)),
        scores((1, 0.5), (2, 0.5), (2, 0.5)),
        scores((1, 0.5), (2, 0.5), (4, 0.5)),
        scores((1, 0.5), (2, 0.5), (3, 0.5), (3, 0.5)),
        scores((1, 0.5), (2, 0.5), (3, 1.5)),
        scores((1, 0.5), (2, 0.5), (3, -0.1)),
        scores((1, 0.5), (2, 0.5), (3, float("nan"))),
        '{"scores": [{"id": 1}]}',
    ],
)
def test_an_answer_without_a_score_for_each_attempt_cannot_be_read(answer: str) -> None:
    with pytest.raises(UnreadableVerdict):
        compare(TRANSCRIPTS, "", "s").read(answer)


def test_scores_are_read_in_a_fence_and_behind_thoughts() -> None:
    comparison = compare(TRANSCRIPTS, "", "s")
    answer = scores((1, 0.1), (2, 0.2), (3, 0.3))
    for wrapped in (
        f"```json\n{answer}\n```",
        f"Here {{they}} are: {answer}",
        f"<think>{{}}</think>{answer}",
    ):
        assert comparison.read(wrapped) == comparison.read(answer)


@contextmanager
def judging(gateway: RunningGateway, model: ScriptedOpenAi, **rule: Any) -> Iterator[RunningRewards]:
    given = {"name": "best", "kind": "relative", "rubric": "Be long.", "backoff_s": 0.02, **rule}
    with (
        serving(model) as url,
        reward_service(
            gateway_url=gateway.url, rules=[given], dispatch=QUICK, judge={"base_url": url}
        ) as rewards,
    ):
        yield rewards


def by_length(body: dict[str, Any]) -> ScriptedReply:
    """Scores each attempt by the number of its `x`."""
    prompt = body["messages"][1]["content"]
    parts = prompt.split(' id="')[1:]
    return ScriptedReply(scores(*((part.split('"')[0], part.count("x") / 10) for part in parts)))


def rewards_of(gateway: RunningGateway, session_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.get(f"/sessions/{session_id}", key=ADMIN_KEY).json()["rewards"]
    return found


def test_each_session_of_a_group_gets_its_score_and_its_place_is_recorded(gateway: RunningGateway) -> None:
    model = ScriptedOpenAi(by_length)
    sessions = group_of(gateway, "x", "xxx", "xx", "none")
    single = gateway.session()["session_id"]
    answered(gateway, single, "alone")
    with judging(gateway, model, seed=7) as rewards:
        found = [wait_until(lambda: rewards_of(gateway, each))[0] for each in sessions]  # noqa: B023
        wait_until(lambda: rewards.get("/status").json()["in_work"] == 0)
    assert [reward["value"] for reward in found] == [0.1, 0.3, 0.2, 0.0]
    assert {reward["key"] for reward in found} == {"best"}
    (body,) = model.bodies
    assert "Be long." in body["messages"][0]["content"]
    assert body["messages"][1]["content"].count("question") == 1
    places = [reward["source"].split(":")[2] for reward in found]
    assert sorted(places) == ["1/4", "2/4", "3/4", "4/4"]
    assert all("7/group/" in reward["source"] for reward in found)
    assert rewards_of(gateway, single) == []


def test_a_group_waits_for_its_open_sessions_but_not_until_it_expires(
    turned: TurnedClock, gateway: RunningGateway
) -> None:
    model = ScriptedOpenAi(by_length)
    first, second, third = (
        member["session_id"] for member in gateway.post("/groups", {"size": 3}).json()["sessions"]
    )
    answered(gateway, first, "x")
    answered(gateway, second, "xx", "failed")
    with judging(gateway, model) as rewards:
        wait_until(lambda: rewards.metric(READINGS) >= 4)
        assert model.bodies == []
        answered(gateway, third, "xxx")
        assert wait_until(lambda: rewards_of(gateway, third))[0]["value"] == 0.3
        assert wait_until(lambda: rewards_of(gateway, first))[0]["value"] == 0.1
        assert rewards_of(gateway, second) == []
    members = gateway.post("/groups", {"size": 2, "ttl_s": 2000}).json()["sessions"]
    late, never = (member["session_id"] for member in members)
    answered(gateway, late, "x")
    with judging(gateway, model, before_expiry_s=10_000):
        turned.turn(1100)  # more than half of its life
        assert wait_until(lambda: rewards_of(gateway, late))
        assert rewards_of(gateway, never) == []


def test_a_malformed_answer_is_asked_for_once_more(gateway: RunningGateway) -> None:
    replies = [ScriptedReply("good")]
    model = ScriptedOpenAi(lambda body: replies.pop() if replies else by_length(body))
    first, _ = group_of(gateway, "x", "xx")
    with judging(gateway, model):
        assert wait_until(lambda: rewards_of(gateway, first))[0]["value"] == 0.1
    assert [len(body["messages"]) for body in model.bodies] == [2, 4]
    assert "cannot be used" in model.bodies[1]["messages"][3]["content"]


def test_a_group_whose_judge_fails_is_a_dead_letter_and_has_no_reward(gateway: RunningGateway) -> None:
    model = ScriptedOpenAi(lambda _: ScriptedReply("good"))
    sessions = group_of(gateway, "x", "xx")
    with judging(gateway, model, attempts=2) as rewards:
        (letter,) = wait_until(lambda: rewards.get("/status").json()["dead_letters"])
    assert letter["unit"].startswith("group/")
    assert len(model.bodies) == 4
    assert [rewards_of(gateway, each) for each in sessions] == [[], []]


def test_a_group_of_which_a_part_was_rewarded_is_finished(gateway: RunningGateway) -> None:
    model = ScriptedOpenAi(by_length)
    first, second = group_of(gateway, "x", "xx")
    gateway.post(f"/sessions/{first}/reward", {"value": 0.9, "key": "best"})
    with judging(gateway, model):
        assert wait_until(lambda: rewards_of(gateway, second))[0]["source"].split(":")[2] in ("1/2", "2/2")
    assert [reward["value"] for reward in rewards_of(gateway, first)] == [0.9]


@pytest.mark.parametrize("bound", [{"most_members": 2}, {"most_chars": 10}])
def test_a_group_that_is_too_large_is_a_dead_letter(gateway: RunningGateway, bound: dict[str, int]) -> None:
    group_of(gateway, "x", "xx", "xxx")
    with judging(gateway, ScriptedOpenAi(by_length), **bound) as rewards:
        (letter,) = wait_until(lambda: rewards.get("/status").json()["dead_letters"])
    assert "the group has more than" in letter["reason"]
