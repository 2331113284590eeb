"""How a session's turns follow each other, as its view and the metrics tell it."""

from typing import Any

from tests.gateway.conftest import Door


def say(door: Door, session: dict[str, Any], *texts: str, system: str = "") -> str:
    """A conversation of users' texts and the answers that were given; gives the new answer back."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, text in enumerate(texts):
        messages.append({"role": "assistant" if index % 2 else "user", "content": text})
    reply = door.post(f"/sessions/{session['session_id']}/v1/chat/completions", {"messages": messages})
    answer: str = reply.json()["choices"][0]["message"]["content"]
    return answer


def view(door: Door, session: dict[str, Any]) -> Any:
    return door.get(f"/sessions/{session['session_id']}").json()


def metric(door: Door, name: str) -> float:
    lines = door.get("/metrics", key=None).text.splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(name)), "0"))


def test_a_conversation_that_goes_on_is_one_row(door: Door) -> None:
    session = door.session()
    assert view(door, session)["merge_ratio"] is None
    first = say(door, session, "a")
    second = say(door, session, "a", first, "b")
    say(door, session, "a", first, "b", second, "c")
    told = view(door, session)
    assert told["merge_ratio"] == 1 / 3
    assert told["drift"] == {"extends": 2, "rerendered": 0, "forks": {}}


def test_every_fork_is_a_row_and_says_why(door: Door) -> None:
    before = {reason: metric(door, drifted(reason)) for reason in ("sub_agent", "sampled_again")}
    session = door.session()
    first = say(door, session, "a", system="plan")
    say(door, session, "a", first, "b", system="plan")
    say(door, session, "a", system="plan")  # once more: best of two
    say(door, session, "look this up", system="search")
    told = view(door, session)
    assert [turn["reason"] for turn in told["turns"]] == [None, None, "sampled_again", "sub_agent"]
    assert told["drift"] == {"extends": 1, "rerendered": 0, "forks": {"sampled_again": 1, "sub_agent": 1}}
    assert told["merge_ratio"] == 3 / 4
    for reason, count in before.items():
        assert metric(door, drifted(reason)) == count + 1
    assert 0 < metric(door, "weir_merge_ratio") <= 1


def test_turns_that_nobody_heard_make_no_row(door: Door) -> None:
    session = door.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "a"}]}
    door.post(path, body)
    door.post(path, body, headers={"x-stainless-retry-count": "1"})
    told = view(door, session)
    assert [turn["verdict"]["code"] for turn in told["turns"]] == ["orphan_retry", "open"]
    assert told["merge_ratio"] == 1.0


def drifted(reason: str) -> str:
    return f'weir_drift_total{{reason="{reason}",relation="forks"}}'
