"""Sessions that wait for a reward get it once, from the rule that matches, and from no grader that failed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.reward_service.running import RunningRewards, reward_service
from tests.support.reward_service.scripted_grader import ScriptedGrader
from tests.support.reward_service.sessions import (
    QUICK,
    finished,
    outcomes,
    reward_of,
    shown,
    two_more_readings,
    values_of,
    wait_for,
)
from tests.support.serving import serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until


@contextmanager
def rewarding(gateway: RunningGateway, *rules: dict[str, Any], **dispatch: Any) -> Iterator[RunningRewards]:
    """A reward service with these rules, which reads the list often."""
    with reward_service(gateway_url=gateway.url, rules=list(rules), dispatch=QUICK | dispatch) as rewards:
        yield rewards


def python(expression: str, name: str = "own", **more: Any) -> dict[str, Any]:
    source = f"def grade(sample, item):\n    return {expression}\n"
    return {"name": name, "kind": "python", "source": source, "backoff_s": 0.02, **more}


def http(url: str, **more: Any) -> dict[str, Any]:
    return {"name": "remote", "kind": "http", "url": url, "backoff_s": 0.02, **more}


def test_a_finished_session_is_rewarded_with_the_rules_name_as_key(gateway: RunningGateway) -> None:
    before = finished(gateway, "42", metadata={"item": {"answer": "42"}})
    rule = python("float(sample['output_text'] == item['answer'])")
    with rewarding(gateway, rule) as rewards:
        after = finished(gateway, "41", metadata={"item": {"answer": "42"}})
        assert reward_of(gateway, before)["value"] == 1.0
        reward = reward_of(gateway, after)
        assert (reward["value"], reward["key"], reward["source"]) == (0.0, "own", "python:own")
        wait_until(lambda: rewards.get("/ready", None).status_code == 200)
    assert shown(gateway, before)["state"] == "finished"


def test_the_first_rule_that_matches_rewards_a_session(gateway: RunningGateway) -> None:
    """One that its environment scores is graded by nobody. The list has several pages of two sessions."""
    rules = [
        python("1.0", "by-prefix", task_prefix="sums-"),
        python("2.0", "by-metadata", metadata_grader="style"),
        {"name": "games", "kind": "env"},
        python("3.0", "others", task_prefix="other"),
    ]
    played = {"environment": "textarena:Chess-v0"}
    matches = {
        "by-prefix": finished(gateway, task_id="sums-1", metadata={"grader": "style"} | played),
        "by-metadata": finished(gateway, task_id="x", metadata={"grader": "style"}),
        "others": finished(gateway, task_id="other", metadata={"environment": 1}),
    }
    scored = finished(gateway, task_id="other", metadata=played)
    unmatched = [scored, finished(gateway, task_id="x"), gateway.session(task_id="sums-2")["session_id"]]
    with rewarding(gateway, *rules) as rewards:
        for name, session_id in matches.items():
            assert reward_of(gateway, session_id)["key"] == name
            wait_for(rewards, name, "rewarded")
        two_more_readings(rewards)
        status = rewards.get("/status").json()
        assert (status["waiting"], status["remembered"]) == (dict.fromkeys(matches, 0), 0)
    assert [len(values_of(gateway, each)) for each in matches.values()] == [1, 1, 1]
    assert [values_of(gateway, each) for each in unmatched] == [[], [], []]
    assert shown(gateway, scored)["state"] == "waiting_reward"


def test_an_http_grader_gets_the_contracts_body(gateway: RunningGateway) -> None:
    """It credits the session's turn."""
    session_id = finished(gateway, "forty", task_id="t", metadata={"a": 1})
    (turn_id,) = (each["turn_id"] for each in shown(gateway, session_id)["turns"])
    reward = f'{{"rewards": [{{"session_id": "{session_id}", "value": 0.5, "turn_id": "{turn_id}"}}]}}'
    grader = ScriptedGrader(lambda _: reward.encode())
    with serving(grader) as url, rewarding(gateway, http(url, rubric="Be kind.", api_key="hush")):
        given = reward_of(gateway, session_id)
    assert (given["value"], given["key"], given["source"]) == (0.5, "remote", "http:remote")
    assert given["turn_id"] == turn_id
    (body,) = grader.bodies
    told = {name: body[name] for name in ("kind", "rubric", "attempt", "key")}
    assert told == {"kind": "session", "rubric": "Be kind.", "attempt": 1, "key": "remote"}
    (session,) = body["sessions"]
    assert (session["session_id"], session["task_id"], session["metadata"]) == (session_id, "t", {"a": 1})
    assert session["status"] == "completed"
    (turn,) = session["turns"]
    assert session["turn_ids"] == [turn["turn_id"]] == [turn_id]
    assert "question" in turn["context_text"]
    assert turn["message"]["content"] == "forty"
    (headers,) = grader.headers
    assert headers["authorization"] == "Bearer hush"
    assert headers["idempotency-key"] == f"{session_id}/remote"


GARBAGE = [
    b'{"rewards": [{"session_id": "SESSION", "value": NaN}]}',
    b'{"rewards": [{"session_id": "SESSION", "value": 1e999}]}',
    b'{"rewards": [{"session_id": "SESSION", "value": true}]}',
    b'{"rewards": [{"session_id": "SESSION", "value": "1"}]}',
    b'{"rewards": [{"session_id": "SESSION"}]}',
    b'{"rewards": [{"session_id": "other", "value": 1}]}',
    b'{"rewards": [{"session_id": "SESSION", "value": 1}, {"session_id": "SESSION", "value": 1}]}',
    b'{"rewards": [{"session_id": "SESSION", "value": 1, "turn_id": "other"}]}',
    b'{"rewards": [{"session_id": "SESSION", "value": 1, "turn_id": "caf\xe9"}]}',
    b'{"reward": 1}',
    b"<html>",
    b"",
    b"x" * 2000,
]


def test_garbage_is_a_failed_attempt_and_never_a_reward(gateway: RunningGateway) -> None:
    answers = {finished(gateway): answer for answer in GARBAGE}

    def answer(body: dict[str, Any]) -> bytes:
        session_id = body["sessions"][0]["session_id"]
        return answers[session_id].replace(b"SESSION", session_id.encode())

    grader = ScriptedGrader(answer)
    with serving(grader) as url, rewarding(gateway, http(url, attempts=2), answer_bytes=1024) as rewards:
        wait_for(rewards, "remote", "dead_letter", len(answers))
        two_more_readings(rewards)
        letters = rewards.get("/status").json()["dead_letters"]
    assert {(each["unit"], each["rule"], each["attempts"]) for each in letters} == {
        (session_id, "remote", 2) for session_id in answers
    }
    for session_id, garbage in answers.items():
        assert grader.attempts(session_id) == [1, 2], garbage
        found = shown(gateway, session_id)
        assert (found["state"], found["reward"]) == ("waiting_reward", None), garbage
        assert found["verdict"]["code"] == "waiting_reward"


def test_a_grader_that_answers_500_and_then_a_number_rewards_once(gateway: RunningGateway) -> None:
    grader = ScriptedGrader(lambda _: 1.0)

    def answer(body: dict[str, Any]) -> float:
        grader.status = 500 if body["attempt"] < 3 else 200
        return 1.0

    grader.answer = answer
    session_id = finished(gateway)
    with serving(grader) as url, rewarding(gateway, http(url)) as rewards:
        assert reward_of(gateway, session_id)["value"] == 1.0
        wait_for(rewards, "remote", "rewarded")
        assert rewards.metric('weir_rewards_attempts_total{outcome="failed",rule="remote"}') == 2
    assert grader.attempts(session_id) == [1, 2, 3]
    assert len(values_of(gateway, session_id)) == 1


def test_a_grader_that_never_answers_leaves_the_session_waiting(gateway: RunningGateway) -> None:
    session_id = finished(gateway)
    grader = ScriptedGrader(lambda _: 1.0, hang=True)
    with serving(grader) as url, rewarding(gateway, http(url, timeout_s=0.2, attempts=2)) as rewards:
        wait_for(rewards, "remote", "dead_letter")
        assert rewards.get("/status").json()["dead_letters"][0]["reason"]
        grader.let_answer()  # too late
        two_more_readings(rewards)
    assert shown(gateway, session_id)["reward"] is None


def test_a_session_that_nobody_could_grade_expires_without_a_reward(
    turned: TurnedClock, own_gateway: RunningGateway
) -> None:
    session_id = finished(own_gateway, ttl_s=3600)
    with rewarding(own_gateway, python("float('nan')", attempts=1)) as rewards:
        wait_for(rewards, "own", "dead_letter")
        turned.turn(3600)
        found = wait_until(lambda: (one := shown(own_gateway, session_id))["state"] == "finished" and one)
        assert found["verdict"]["code"] == "expired"
        assert (found["reward"], found["rewards"]) == (None, [])
        wait_until(lambda: rewards.metric("weir_rewards_sessions_remembered") == 0)


def test_null_is_no_opinion_and_is_not_asked_again(gateway: RunningGateway) -> None:
    sessions = [finished(gateway), finished(gateway)]
    answers: list[float | bytes | None] = [None, b'{"rewards": []}']
    grader = ScriptedGrader(lambda _: answers.pop(0))
    with serving(grader) as url, rewarding(gateway, http(url, concurrency=1)) as rewards:
        wait_for(rewards, "remote", "no_opinion", 2)
        two_more_readings(rewards)
        assert outcomes(rewards, "remote", "dead_letter") == 0
    assert len(grader.bodies) == 2
    assert [values_of(gateway, each) for each in sessions] == [[], []]


def test_a_dead_letter_is_tried_again_when_an_operator_says_so(gateway: RunningGateway) -> None:
    session_id = finished(gateway)
    grader = ScriptedGrader(lambda _: 1.0, status=500)
    with serving(grader) as url, rewarding(gateway, http(url, attempts=1)) as rewards:
        wait_for(rewards, "remote", "dead_letter")
        grader.status = 200
        assert rewards.post("/dead_letters/retry", "client-key").status_code == 403
        assert rewards.post("/dead_letters/retry").json() == {"retried": 1}
        assert reward_of(gateway, session_id)["value"] == 1.0
        assert rewards.get("/status").json()["dead_letters"] == []


def test_a_service_that_stops_while_it_grades_loses_nothing(gateway: RunningGateway) -> None:
    session_id = finished(gateway)
    grader = ScriptedGrader(lambda _: 0.25, hang=True)
    with serving(grader) as url:
        with rewarding(gateway, http(url)):
            assert grader.called.wait(300)
        assert shown(gateway, session_id)["reward"] is None
        grader.let_answer()
        with rewarding(gateway, http(url)):
            assert reward_of(gateway, session_id)["value"] == 0.25


def test_two_services_reward_a_session_once(gateway: RunningGateway) -> None:
    values = iter(range(1, 100))
    grader = ScriptedGrader(lambda _: float(next(values)))
    sessions = [finished(gateway) for _ in range(5)]
    with serving(grader) as url, rewarding(gateway, http(url)) as one, rewarding(gateway, http(url)) as two:
        for session_id in sessions:
            assert reward_of(gateway, session_id)
        for rewards in (one, two):
            wait_until(lambda: rewards.get("/status").json()["in_work"] == 0)  # noqa: B023 - called at once
    assert [len(values_of(gateway, session_id)) for session_id in sessions] == [1] * 5


def test_openais_grader_objects_reward_sessions_and_their_errors_do_not(gateway: RunningGateway) -> None:
    grader = {
        "type": "string_check",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "operation": "eq",
    }
    rule = {"name": "equal", "kind": "openai_grader", "grader": grader, "attempts": 1}
    right = finished(gateway, "42", metadata={"answer": "42"})
    without = finished(gateway, "42")
    with rewarding(gateway, rule) as rewards:
        assert reward_of(gateway, right)["value"] == 1.0
        wait_for(rewards, "equal", "dead_letter")
        assert "invalid_variable_error" in rewards.get("/status").json()["dead_letters"][0]["reason"]
    assert shown(gateway, without)["reward"] is None


def test_a_judge_reads_the_episode_and_its_own_session_is_graded_by_nobody(gateway: RunningGateway) -> None:
    """It is asked again, in another session, because its first answer has no score."""
    session_id = finished(gateway, "forty two", metadata={"answer": "42"})
    gateway.engine.script.extend(["I cannot say.", '{"steps": [], "result": 0.75}'])
    rule = {"name": "kind", "kind": "judge", "rubric": "The answer is {{item.answer}}.", "backoff_s": 0.02}
    with rewarding(gateway, rule) as rewards:
        assert reward_of(gateway, session_id)["value"] == 0.75
        wait_for(rewards, "kind", "rewarded")
        two_more_readings(rewards)
        assert outcomes(rewards, "kind", "rewarded") == 1
    rows = gateway.get("/sessions", key=ADMIN_KEY).json()["data"]
    judges = [row for row in rows if row["session_id"] != session_id]
    assert len(judges) == 2
    for judge in judges:
        assert (judge["state"], judge["verdict"]["code"], judge["reward"]) == ("finished", "abandoned", None)
        assert judge["metadata"] == {"weir_judge": "kind"}
        (turn,) = gateway.get(f"/sessions/{judge['session_id']}?text=true", key=ADMIN_KEY).json()["turns"]
        assert "The answer is 42." in turn["context_text"]
        assert "forty two" in turn["context_text"]


def test_a_session_without_an_answer_or_too_large_is_a_dead_letter_at_once(gateway: RunningGateway) -> None:
    silent, large = gateway.session()["session_id"], finished(gateway, "x" * 2000)
    gateway.post(f"/sessions/{silent}/finish", {"status": "completed"})
    with rewarding(gateway, python("1.0"), session_bytes=1500) as rewards:
        wait_for(rewards, "own", "dead_letter", 2)
        letters = {each["unit"]: each for each in rewards.get("/status").json()["dead_letters"]}
    assert [letters[each]["attempts"] for each in (silent, large)] == [1, 1]
    assert "larger than 1500 bytes" in letters[large]["reason"]
    assert "larger" not in letters[silent]["reason"]
    assert [values_of(gateway, each) for each in (silent, large)] == [[], []]


def test_a_session_that_was_rewarded_or_deleted_meanwhile_is_left(gateway: RunningGateway) -> None:
    rewarded, deleted = finished(gateway), finished(gateway)
    grader = ScriptedGrader(lambda _: 1.0, hang=True)
    with serving(grader) as url, rewarding(gateway, http(url)) as rewards:
        wait_until(lambda: len(grader.bodies) == 2)
        gateway.post(f"/sessions/{rewarded}/reward", {"value": 0.5, "key": "remote"})
        gateway.call("DELETE", f"/sessions/{deleted}")
        grader.let_answer()
        wait_for(rewards, "remote", "already")
        wait_for(rewards, "remote", "gone")
    assert values_of(gateway, rewarded) == [0.5]


def test_a_session_that_somebody_rewarded_while_it_waited_is_not_graded(gateway: RunningGateway) -> None:
    first, second = finished(gateway), finished(gateway)
    grader = ScriptedGrader(lambda _: 1.0, hang=True)
    with serving(grader) as url, rewarding(gateway, http(url, concurrency=1)) as rewards:
        wait_until(lambda: rewards.metric('weir_rewards_queue{rule="remote"}') == 1)
        assert grader.called.wait(300)
        gateway.post(f"/sessions/{second}/reward", {"value": 0.5})
        grader.let_answer()
        wait_for(rewards, "remote", "already")
        assert reward_of(gateway, first)["value"] == 1.0
    assert values_of(gateway, second) == [0.5]
    assert grader.attempts(second) == []


def test_the_memory_is_bounded_and_sessions_that_are_gone_are_forgotten(gateway: RunningGateway) -> None:
    first, second = finished(gateway), finished(gateway)
    grader = ScriptedGrader(lambda _: None)
    with serving(grader) as url, rewarding(gateway, http(url), remembered=1) as rewards:
        wait_for(rewards, "remote", "no_opinion")
        two_more_readings(rewards)
        assert [body["sessions"][0]["session_id"] for body in grader.bodies] == [first]
        assert rewards.metric("weir_rewards_sessions_remembered") == 1
        gateway.call("DELETE", f"/sessions/{first}")
        wait_for(rewards, "remote", "no_opinion", 2)
    assert grader.attempts(second) == [1]


def test_a_gateway_that_is_away_is_told_by_ready_and_costs_no_attempt() -> None:
    with reward_service(gateway_url="http://127.0.0.1:9", rules=[python("1.0")], dispatch=QUICK) as rewards:
        wait_until(lambda: "ConnectError" in rewards.get("/ready", None).text)
        assert rewards.get("/ready", None).status_code == 503
        assert rewards.metric('weir_rewards_attempts_total{outcome="failed",rule="own"}') == 0
