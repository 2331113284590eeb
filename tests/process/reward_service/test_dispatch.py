"""Sessions that wait for a reward get it once, from the rule that matches, and from no grader that failed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.reward_service.running import RunningRewards, reward_service
from tests.support.reward_service.scripted_grader import ScriptedGrader
from tests.support.serving import serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

QUICK = {"poll_every_s": 0.05, "backoff_limit_s": 0.1, "page": 2}


@contextmanager
def rewarding(gateway: RunningGateway, *rules: dict[str, Any], **settings: Any) -> Iterator[RunningRewards]:
    """A reward service with these rules, which reads the list often."""
    given = {
        "gateway_url": gateway.url,
        "rules": list(rules),
        "dispatch": QUICK | settings.pop("dispatch", {}),
    }
    with reward_service(**given, **settings) as rewards:
        yield rewards


def python(expression: str, name: str = "own", **more: Any) -> dict[str, Any]:
    source = f"def grade(sample, item):\n    return {expression}\n"
    return {"name": name, "kind": "python", "source": source, "backoff_s": 0.02, **more}


def http(url: str, **more: Any) -> dict[str, Any]:
    return {"name": "remote", "kind": "http", "url": url, "backoff_s": 0.02, **more}


def finished(
    gateway: RunningGateway, answer: str = "hello", *, status: str = "completed", **session: Any
) -> str:
    """A session with one answer that is finished, and waits for a reward."""
    opened = gateway.session(**session)
    gateway.engine.script.append(answer)
    path = f"/sessions/{opened['session_id']}"
    assert gateway.chat("question", f"{path}/v1/chat/completions").status_code == 200
    assert gateway.post(f"{path}/finish", {"status": status}).status_code == 200
    return str(opened["session_id"])


def shown(gateway: RunningGateway, session_id: str) -> dict[str, Any]:
    found: dict[str, Any] = gateway.get(f"/sessions/{session_id}", key=ADMIN_KEY).json()
    return found


def reward_of(gateway: RunningGateway, session_id: str) -> Any:
    return wait_until(lambda: shown(gateway, session_id)["rewards"])[0]


def outcomes(rewards: RunningRewards, rule: str, outcome: str) -> float:
    return rewards.metric(f'weir_rewards_sessions_total{{outcome="{outcome}",rule="{rule}"}}')


def wait_for(rewards: RunningRewards, rule: str, outcome: str, count: int = 1) -> None:
    wait_until(lambda: outcomes(rewards, rule, outcome) >= count)


def two_more_readings(rewards: RunningRewards) -> None:
    """Wait until the list was read twice more, once of it from the start."""
    name = 'weir_rewards_list_readings_total{outcome="read"}'
    before = rewards.metric(name)
    wait_until(lambda: rewards.metric(name) >= before + 2)


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
    rules = [
        python("1.0", "by-prefix", task_prefix="sums-"),
        python("2.0", "by-metadata", metadata_grader="style"),
        python("3.0", "all-others", task_prefix="other"),
    ]
    prefix = finished(gateway, task_id="sums-1", metadata={"grader": "style"})
    metadata = finished(gateway, task_id="x", metadata={"grader": "style"})
    neither = finished(gateway, task_id="x")
    open_ = gateway.session(task_id="sums-2")["session_id"]
    with rewarding(gateway, *rules) as rewards:
        assert reward_of(gateway, prefix)["key"] == "by-prefix"
        assert reward_of(gateway, metadata)["key"] == "by-metadata"
        two_more_readings(rewards)
    for session_id in (prefix, metadata):
        assert len(shown(gateway, session_id)["rewards"]) == 1
    for session_id in (neither, open_):
        assert shown(gateway, session_id)["rewards"] == []


def test_a_session_that_its_environment_scores_is_graded_by_nobody(gateway: RunningGateway) -> None:
    rules = [
        python("1.0", "essays", task_prefix="essays"),
        {"name": "games", "kind": "env"},
        python("2.0", "all-others"),
    ]
    played = {"environment": "textarena:Chess-v0"}
    scored = finished(gateway, task_id="chess", metadata=played)
    elsewhere = finished(gateway, task_id="essays-1", metadata=played)
    other = finished(gateway, task_id="chess", metadata={"environment": 1})
    with rewarding(gateway, *rules) as rewards:
        assert reward_of(gateway, elsewhere)["key"] == "essays"
        assert reward_of(gateway, other)["key"] == "all-others"
        two_more_readings(rewards)
        assert rewards.get("/status").json()["waiting"] == {"essays": 0, "all-others": 0}
        assert rewards.get("/status").json()["remembered"] == 0
    assert shown(gateway, scored)["state"] == "waiting_reward"
    assert shown(gateway, scored)["rewards"] == []


def test_all_pages_of_the_list_are_read(gateway: RunningGateway) -> None:
    sessions = [finished(gateway, task_id="sums" if number == 6 else "other") for number in range(7)]
    with rewarding(gateway, python("1.0", task_prefix="sums")):  # pages of two sessions
        assert reward_of(gateway, sessions[-1])["value"] == 1.0


def test_an_http_grader_gets_the_contracts_body(gateway: RunningGateway) -> None:
    grader = ScriptedGrader(lambda _: 0.5)
    with serving(grader) as url:
        session_id = finished(gateway, "forty", task_id="t", metadata={"a": 1})
        with rewarding(gateway, http(url, rubric="Be kind.", api_key="hush")):
            reward = reward_of(gateway, session_id)
    assert (reward["value"], reward["key"], reward["source"]) == (0.5, "remote", "http:remote")
    (body,) = grader.bodies
    assert (body["kind"], body["rubric"], body["attempt"], body["key"]) == (
        "session",
        "Be kind.",
        1,
        "remote",
    )
    (session,) = body["sessions"]
    assert (session["session_id"], session["task_id"], session["metadata"]) == (session_id, "t", {"a": 1})
    assert session["status"] == "completed"
    (turn,) = session["turns"]
    assert session["turn_ids"] == [turn["turn_id"]]
    assert "question" in turn["context_text"]
    assert turn["message"]["content"] == "forty"
    (headers,) = grader.headers
    assert headers["authorization"] == "Bearer hush"
    assert headers["idempotency-key"] == f"{session_id}/remote"


@pytest.mark.parametrize(
    "answer",
    [
        b'{"rewards": [{"session_id": "SESSION", "value": NaN}]}',
        b'{"rewards": [{"session_id": "SESSION", "value": 1e999}]}',
        b'{"rewards": [{"session_id": "SESSION", "value": true}]}',
        b'{"rewards": [{"session_id": "SESSION", "value": "1"}]}',
        b'{"rewards": [{"session_id": "SESSION"}]}',
        b'{"rewards": [{"session_id": "other", "value": 1}]}',
        b'{"rewards": [{"session_id": "SESSION", "value": 1}, {"session_id": "SESSION", "value": 1}]}',
        b'{"rewards": [{"session_id": "SESSION", "value": 1, "turn_id": "other"}]}',
        b'{"reward": 1}',
        b"<html>",
        b"",
        b"x" * 2000,
    ],
)
def test_garbage_is_a_failed_attempt_and_never_a_reward(gateway: RunningGateway, answer: bytes) -> None:
    session_id = finished(gateway)
    grader = ScriptedGrader(lambda _: answer.replace(b"SESSION", session_id.encode()))
    with (
        serving(grader) as url,
        rewarding(gateway, http(url, attempts=2), dispatch={"answer_bytes": 1024}) as rewards,
    ):
        wait_for(rewards, "remote", "dead_letter")
        two_more_readings(rewards)
        (letter,) = rewards.get("/status").json()["dead_letters"]
    assert (letter["unit"], letter["rule"], letter["attempts"]) == (session_id, "remote", 2)
    assert grader.attempts(session_id) == [1, 2]
    found = shown(gateway, session_id)
    assert (found["state"], found["reward"], found["verdict"]["code"]) == (
        "waiting_reward",
        None,
        "waiting_reward",
    )


def test_a_grader_that_answers_500_and_then_a_number_rewards_once(gateway: RunningGateway) -> None:
    grader = ScriptedGrader(lambda _: 1.0, status=500)

    def answer(body: dict[str, Any]) -> float:
        grader.status = 500 if body["attempt"] < 3 else 200
        return 1.0

    grader.answer = answer
    session_id = finished(gateway)
    with serving(grader) as url, rewarding(gateway, http(url)) as rewards:
        assert reward_of(gateway, session_id)["value"] == 1.0
        wait_for(rewards, "remote", "rewarded")
        failed = rewards.metric('weir_rewards_attempts_total{outcome="failed",rule="remote"}')
    assert grader.attempts(session_id) == [1, 2, 3]
    assert failed == 2
    assert len(shown(gateway, session_id)["rewards"]) == 1


def test_a_grader_that_never_answers_leaves_the_session_waiting(gateway: RunningGateway) -> None:
    session_id = finished(gateway)
    grader = ScriptedGrader(lambda _: 1.0, hang=True)
    with serving(grader) as url, rewarding(gateway, http(url, timeout_s=0.2, attempts=2)) as rewards:
        wait_for(rewards, "remote", "dead_letter")
        letter = rewards.get("/status").json()["dead_letters"][0]
        assert letter["reason"]
        grader.let_answer()  # too late
        two_more_readings(rewards)
    assert shown(gateway, session_id)["reward"] is None


def test_a_session_that_nobody_could_grade_expires_without_a_reward(
    turned: TurnedClock, gateway: RunningGateway
) -> None:
    session_id = finished(gateway, ttl_s=3600)
    with rewarding(gateway, python("float('nan')", attempts=1)) as rewards:
        wait_for(rewards, "own", "dead_letter")
        turned.turn(3600)
        found = wait_until(lambda: (one := shown(gateway, session_id))["state"] == "finished" and one)
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
    assert [shown(gateway, each)["reward"] for each in sessions] == [None, None]


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
    assert all(len(shown(gateway, session_id)["rewards"]) == 1 for session_id in sessions)


def test_a_turn_can_be_credited(gateway: RunningGateway) -> None:
    session_id = finished(gateway)
    turn_id = shown(gateway, session_id)["turns"][0]["turn_id"]
    reward = f'{{"rewards": [{{"session_id": "{session_id}", "value": 1, "turn_id": "{turn_id}"}}]}}'
    with serving(ScriptedGrader(lambda _: reward.encode())) as url, rewarding(gateway, http(url)):
        assert reward_of(gateway, session_id)["turn_id"] == turn_id


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
    session_id = finished(gateway, "forty two", metadata={"answer": "42"})
    gateway.engine.mind = '{"steps": [], "result": 0.75}'
    rule = {"name": "kind", "kind": "judge", "rubric": "The answer is {{item.answer}}."}
    with rewarding(gateway, rule) as rewards:
        assert reward_of(gateway, session_id)["value"] == 0.75
        two_more_readings(rewards)
        assert outcomes(rewards, "kind", "rewarded") == 1
    rows = gateway.get("/sessions", key=ADMIN_KEY).json()["data"]
    (judge,) = [row for row in rows if row["session_id"] != session_id]
    assert (judge["state"], judge["verdict"]["code"], judge["reward"]) == ("finished", "abandoned", None)
    assert judge["metadata"] == {"weir_judge": "kind"}
    (turn,) = gateway.get(f"/sessions/{judge['session_id']}?text=true", key=ADMIN_KEY).json()["turns"]
    assert "The answer is 42." in turn["context_text"]
    assert "forty two" in turn["context_text"]


def test_a_judge_without_a_score_is_tried_again(gateway: RunningGateway) -> None:
    session_id = finished(gateway)
    gateway.engine.script.extend(["I cannot say.", "0.5"])
    rule = {"name": "kind", "kind": "judge", "rubric": "Be kind.", "backoff_s": 0.02}
    with rewarding(gateway, rule):
        assert reward_of(gateway, session_id)["value"] == 0.5


def test_a_session_without_an_answer_is_a_dead_letter_at_once(gateway: RunningGateway) -> None:
    session_id = gateway.session()["session_id"]
    gateway.post(f"/sessions/{session_id}/finish", {"status": "completed"})
    with rewarding(gateway, python("1.0")) as rewards:
        wait_for(rewards, "own", "dead_letter")
        assert rewards.get("/status").json()["dead_letters"][0]["attempts"] == 1
    assert shown(gateway, session_id)["reward"] is None


def test_a_session_that_is_too_large_is_a_dead_letter(gateway: RunningGateway) -> None:
    finished(gateway)
    with rewarding(gateway, python("1.0"), dispatch={"session_bytes": 1024}) as rewards:
        wait_for(rewards, "own", "dead_letter")
        assert "larger than 1024 bytes" in rewards.get("/status").json()["dead_letters"][0]["reason"]


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
    assert [each["value"] for each in shown(gateway, rewarded)["rewards"]] == [0.5]


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
    assert [each["value"] for each in shown(gateway, second)["rewards"]] == [0.5]
    assert grader.attempts(second) == []


def test_the_memory_is_bounded_and_sessions_that_are_gone_are_forgotten(gateway: RunningGateway) -> None:
    first, second = finished(gateway), finished(gateway)
    grader = ScriptedGrader(lambda _: None)
    with serving(grader) as url, rewarding(gateway, http(url), dispatch={"remembered": 1}) as rewards:
        wait_for(rewards, "remote", "no_opinion")
        two_more_readings(rewards)
        assert [body["sessions"][0]["session_id"] for body in grader.bodies] == [first]
        assert rewards.metric("weir_rewards_sessions_remembered") == 1
        gateway.call("DELETE", f"/sessions/{first}")
        wait_for(rewards, "remote", "no_opinion", 2)
    assert grader.attempts(second) == [1]


def test_a_gateway_that_is_away_is_told_by_ready_and_costs_no_attempt(gateway: RunningGateway) -> None:
    with reward_service(gateway_url="http://127.0.0.1:9", rules=[python("1.0")], dispatch=QUICK) as rewards:
        wait_until(lambda: "ConnectError" in rewards.get("/ready", None).text)
        assert rewards.get("/ready", None).status_code == 503
        assert rewards.metric('weir_rewards_attempts_total{outcome="failed",rule="own"}') == 0
