"""How a session's turns follow each other, in the session's view and in the metrics."""

from typing import Any

from tests.support.gateway.running import RunningGateway


def say(gateway: RunningGateway, session: dict[str, Any], *texts: str, system: str = "") -> str:
    """Make a call whose texts are by the user and the model in turn; return the new answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, text in enumerate(texts):
        messages.append({"role": "assistant" if index % 2 else "user", "content": text})
    reply = gateway.post(f"/sessions/{session['session_id']}/v1/chat/completions", {"messages": messages})
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
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "a"}]}
    gateway.post(path, body)
    gateway.post(path, body, headers={"x-stainless-retry-count": "1"})
    told = view(gateway, session)
    assert [turn["verdict"]["code"] for turn in told["turns"]] == ["orphan_retry", "open"]
    assert told["merge_ratio"] == 1.0


def drifted(reason: str) -> str:
    return f'weir_drift_total{{reason="{reason}",relation="forks"}}'
