"""How a session's turns follow each other, and which of them are never trained, in the session's view."""

from typing import Any

from tests.support.gateway.running import RunningGateway


def say(gateway: RunningGateway, session: dict[str, Any], *texts: str, system: str = "") -> str:
    """Make a call whose texts are by the user and the model in turn; return the new answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, text in enumerate(texts):
        messages.append({"role": "assistant" if index % 2 else "user", "content": text})
    reply = gateway.chat(session=session, messages=messages)
    answer: str = reply.json()["choices"][0]["message"]["content"]
    return answer


def view(gateway: RunningGateway, session: dict[str, Any]) -> Any:
    return gateway.get(f"/sessions/{session['session_id']}").json()


def metric(gateway: RunningGateway, name: str) -> float:
    lines = gateway.get("/metrics", key=None).text.splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(name)), "0"))


def test_a_conversation_that_goes_on_is_one_row(gateway: RunningGateway) -> None:
    session = gateway.session()
    assert view(gateway, session)["merge_ratio"] is None
    first = say(gateway, session, "a")
    second = say(gateway, session, "a", first, "b")
    say(gateway, session, "a", first, "b", second, "c")
    told = view(gateway, session)
    assert told["merge_ratio"] == 1 / 3
    assert told["drift"] == {"extends": 2, "rerendered": 0, "forks": {}}


def test_every_fork_is_a_row_and_says_why(gateway: RunningGateway) -> None:
    before = {reason: metric(gateway, drifted(reason)) for reason in ("sub_agent", "sampled_again")}
    session = gateway.session()
    first = say(gateway, session, "a", system="plan")
    say(gateway, session, "a", first, "b", system="plan")
    say(gateway, session, "a", system="plan")  # the same call again: a second sample
    say(gateway, session, "look this up", system="search")
    told = view(gateway, session)
    assert [turn["reason"] for turn in told["turns"]] == [None, None, "sampled_again", "sub_agent"]
    assert told["drift"] == {"extends": 1, "rerendered": 0, "forks": {"sampled_again": 1, "sub_agent": 1}}
    assert told["merge_ratio"] == 3 / 4
    for reason, count in before.items():
        assert metric(gateway, drifted(reason)) == count + 1
    assert 0 < metric(gateway, "weir_merge_ratio") <= 1


def test_turns_without_a_delivered_answer_make_no_row(gateway: RunningGateway) -> None:
    session = gateway.session()
    gateway.chat(session=session)
    gateway.chat(session=session, headers={"x-stainless-retry-count": "1"})
    told = view(gateway, session)
    assert [turn["verdict"]["code"] for turn in told["turns"]] == ["orphan_retry", "open"]
    assert told["merge_ratio"] == 1.0


def drifted(reason: str) -> str:
    return f'weir_drift_total{{reason="{reason}",relation="forks"}}'


# Turns and sessions that are pinned to a version


def test_a_session_pinned_to_a_version_is_not_for_training(gateway: RunningGateway) -> None:
    session = gateway.session(policy="policy@0", sampling={"mode": "exact"}, session_id="pinned")
    again = gateway.post("/sessions", {"policy": "policy@0", "session_id": "pinned", "train": False})
    assert (again.status_code, again.json()["session_id"]) == (200, "pinned"), "it may say so as well"
    gateway.chat(session=session, temperature=0.0)
    told = gateway.finish(session, reward=1.0)["verdict"]
    assert told["code"] == "not_for_training"
    assert told["detail"] == "for evaluation: opened with train: false, or pinned to a version"
    (turn,) = gateway.turns(session)
    assert turn["verdict"]["code"] == "not_for_training"
    assert turn["sampling"]["used"]["temperature"] == 0.0, "it samples as the agent asks"


def test_a_call_pinned_to_a_version_is_not_trained_and_others_of_its_session_are(
    gateway: RunningGateway,
) -> None:
    session = gateway.session()
    assert gateway.chat("one", session=session, model="policy@0").status_code == 200
    assert gateway.chat("two", session=session).status_code == 200
    assert gateway.finish(session, reward=1.0)["verdict"]["code"] == "ready"
    verdicts = [turn["verdict"]["code"] for turn in gateway.turns(session)]
    assert verdicts == ["not_for_training", "ready"]
