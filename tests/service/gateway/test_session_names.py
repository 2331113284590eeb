"""Two client keys may give their sessions the same id, and neither hears of the other's."""

from typing import Any

import pytest

from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, RunningGateway


def test_two_keys_open_a_session_of_the_same_id(gateway: RunningGateway) -> None:
    for key, task in ((CLIENT_KEY, "one"), (OTHER_KEY, "two")):
        reply = gateway.post("/sessions", {"session_id": "a", "task_id": task}, key=key)
        assert (reply.status_code, reply.json()["session_id"]) == (201, "a"), reply.text
    for key, task in ((CLIENT_KEY, "one"), (OTHER_KEY, "two")):
        assert gateway.get("/sessions/a", key=key).json()["task_id"] == task
    listed = gateway.get("/sessions", key=ADMIN_KEY).json()["data"]
    assert {row["task_id"] for row in listed} == {"one", "two"}


@pytest.mark.parametrize("header", ["x-session-id", "x-opencode-session"])
def test_calls_of_two_keys_may_name_the_same_id(gateway: RunningGateway, header: str) -> None:
    for key in (CLIENT_KEY, OTHER_KEY):
        reply = gateway.chat(headers={header: "a"}, key=key)
        assert (reply.status_code, reply.headers["x-weir-session-id"]) == (200, "a"), reply.text
    for key in (CLIENT_KEY, OTHER_KEY):
        assert len(gateway.get("/sessions/a", key=key).json()["turns"]) == 1


def test_a_session_that_was_deleted_does_not_take_its_id_from_other_keys(gateway: RunningGateway) -> None:
    gateway.session(session_id="a")
    assert gateway.call("DELETE", "/sessions/a").status_code == 200
    assert gateway.post("/sessions", {"session_id": "a"}, key=OTHER_KEY).status_code == 201
    assert gateway.get("/sessions/a").status_code == 410


def both(gateway: RunningGateway) -> tuple[dict[str, Any], dict[str, Any]]:
    """The session `a` of each of two keys."""
    replies = [gateway.post("/sessions", {"session_id": "a"}, key=key) for key in (CLIENT_KEY, OTHER_KEY)]
    assert [reply.status_code for reply in replies] == [201, 201]
    return replies[0].json(), replies[1].json()


def test_the_second_session_is_used_in_every_way(gateway: RunningGateway) -> None:
    _, second = both(gateway)
    assert second["base_url"] == f"{gateway.url}/sessions/a/v1"
    assert gateway.post("/sessions", {"session_id": "a"}, key=OTHER_KEY).status_code == 200
    client = gateway.client(second)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    response = client.responses.create(model="m", input="hi")
    assert client.responses.retrieve(response.id).output_text == response.output_text
    assert [model.id for model in client.models.list()] == ["policy"]
    headers = {"x-session-id": "a"}
    assert gateway.chat(headers=headers, key=second["api_key"]).headers["x-weir-session-id"] == "a"
    assert gateway.post("/sessions/a/heartbeat", key=second["api_key"]).json()["session_id"] == "a"
    assert gateway.post("/sessions/a/reward", {"value": 1.0}, key=OTHER_KEY).json()["reward"] == 1.0
    finished = gateway.post("/sessions/a/finish", {"status": "completed"}, key=OTHER_KEY).json()
    assert (finished["session_id"], finished["state"]) == ("a", "finished")
    (row,) = gateway.get("/sessions", key=OTHER_KEY).json()["data"]
    assert (row["session_id"], row["turn_count"], row["reward"]) == ("a", 3, 1.0)
    untouched = gateway.get("/sessions/a").json()
    assert (untouched["turns"], untouched["reward"], untouched["state"]) == ([], None, "open")
    reply = gateway.chat(headers=headers, key=OTHER_KEY)
    assert (reply.status_code, "session a is finished" in reply.text) == (409, True)


def test_a_session_key_does_not_open_the_other_keys_session(gateway: RunningGateway) -> None:
    first, second = both(gateway)
    for session in (first, second):
        assert gateway.chat(path="/sessions/a/v1/chat/completions", key=session["api_key"]).status_code == 200
        assert gateway.chat(path="/sessions/b/v1/chat/completions", key=session["api_key"]).status_code == 403
    for key in (CLIENT_KEY, OTHER_KEY):
        assert len(gateway.get("/sessions/a", key=key).json()["turns"]) == 1


def test_each_key_deletes_its_own(gateway: RunningGateway) -> None:
    both(gateway)
    assert gateway.call("DELETE", "/sessions/a", key=OTHER_KEY).json()["session_id"] == "a"
    assert gateway.get("/sessions/a", key=OTHER_KEY).status_code == 410
    assert gateway.post("/sessions", {"session_id": "a"}, key=OTHER_KEY).status_code == 410
    assert gateway.get("/sessions/a").status_code == 200
    (row,) = gateway.get("/sessions", key=OTHER_KEY).json()["data"]
    assert (row["session_id"], row["verdict"]["code"]) == ("a", "deleted")


def test_nothing_tells_that_another_key_has_the_id(gateway: RunningGateway) -> None:
    gateway.session(session_id="a")
    for path in ("/sessions/a", "/sessions/b"):
        assert gateway.get(path, key=OTHER_KEY).status_code == 404
        assert gateway.post(f"{path}/reward", {"value": 1}, key=OTHER_KEY).status_code == 404
        assert gateway.call("DELETE", path, key=OTHER_KEY).status_code == 404
    taken = gateway.post("/sessions", {"session_id": "a"}, key=OTHER_KEY)
    free = gateway.post("/sessions", {"session_id": "b"}, key=OTHER_KEY)
    for reply in (taken, free):
        assert reply.status_code == 201
    varying = dict.fromkeys(("session_id", "api_key", "base_url", "created_at", "expires_at"))
    assert taken.json() | varying == free.json() | varying
    assert taken.json()["base_url"] == free.json()["base_url"].replace("/b/", "/a/")


def test_an_admin_sees_both_by_their_stored_ids(gateway: RunningGateway) -> None:
    both(gateway)
    ids = [row["session_id"] for row in gateway.get("/sessions", key=ADMIN_KEY).json()["data"]]
    assert len(set(ids)) == 2
    for session_id in ids:
        assert gateway.get(f"/sessions/{session_id}", key=ADMIN_KEY).json()["session_id"] == session_id


def test_the_first_session_may_go_before_the_second(gateway: RunningGateway) -> None:
    both(gateway)
    gateway.chat(headers={"x-session-id": "a"}, key=OTHER_KEY)
    assert gateway.call("DELETE", "/sessions/a").status_code == 200
    gateway.chat(headers={"x-session-id": "a"}, key=OTHER_KEY)
    assert len(gateway.get("/sessions/a", key=OTHER_KEY).json()["turns"]) == 2
