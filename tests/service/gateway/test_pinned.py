"""Sessions and calls that are pinned to a version evaluate it, and are never trained."""

from typing import Any

from tests.support.gateway.running import RunningGateway


def finished(gateway: RunningGateway, session: dict[str, Any]) -> dict[str, Any]:
    reply = gateway.post(f"/sessions/{session['session_id']}/finish", {"status": "completed", "reward": 1.0})
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


def test_a_session_pinned_to_a_version_is_not_for_training(gateway: RunningGateway) -> None:
    session = gateway.session(policy="policy@0", sampling={"mode": "enforce"})
    gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", temperature=0.0)
    told = finished(gateway, session)["verdict"]
    assert told["code"] == "not_for_training"
    assert told["detail"] == "for evaluation: opened with train: false, or pinned to a version"
    (turn,) = gateway.turns(session)
    assert turn["verdict"]["code"] == "not_for_training"
    assert turn["sampling"]["used"]["temperature"] == 0.0, "it samples as the agent asks"


def test_the_same_session_may_say_train_false_as_well(gateway: RunningGateway) -> None:
    session = gateway.session(policy="policy@0", session_id="pinned")
    again = gateway.post("/sessions", {"policy": "policy@0", "session_id": "pinned", "train": False})
    assert (again.status_code, again.json()["session_id"]) == (200, session["session_id"])


def test_a_call_pinned_to_a_version_is_not_trained_and_others_of_its_session_are(
    gateway: RunningGateway,
) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    assert gateway.chat("one", path=path, model="policy@0").status_code == 200
    assert gateway.chat("two", path=path).status_code == 200
    assert finished(gateway, session)["verdict"]["code"] == "ready"
    verdicts = [turn["verdict"]["code"] for turn in gateway.turns(session)]
    assert verdicts == ["not_for_training", "ready"]
