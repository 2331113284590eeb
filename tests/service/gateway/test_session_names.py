"""Two client keys may give their sessions the same id, and neither hears of the other's."""

from typing import Any

from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, RunningGateway


def both(gateway: RunningGateway) -> tuple[dict[str, Any], dict[str, Any]]:
    """The session `a` of each of two keys."""
    owners = ((CLIENT_KEY, "one"), (OTHER_KEY, "two"))
    replies = [
        gateway.post("/sessions", {"session_id": "a", "task_id": task}, key=key) for key, task in owners
    ]
    assert [reply.status_code for reply in replies] == [201, 201]
    return replies[0].json(), replies[1].json()


def test_each_key_has_and_deletes_its_own_and_an_admin_sees_both(gateway: RunningGateway) -> None:
    first, second = both(gateway)
    for session in (first, second):
        for name, status in (("a", 200), ("b", 403)):
            path = f"/sessions/{name}/v1/chat/completions"
            assert gateway.chat(path=path, key=session["api_key"]).status_code == status, name
    for header in ("x-session-id", "x-opencode-session"):
        for key in (CLIENT_KEY, OTHER_KEY):
            reply = gateway.chat(headers={header: "a"}, key=key)
            assert (reply.status_code, reply.headers["x-weir-session-id"]) == (200, "a"), reply.text
    for key, task in ((CLIENT_KEY, "one"), (OTHER_KEY, "two")):
        view = gateway.get("/sessions/a", key=key).json()
        assert (view["task_id"], len(view["turns"])) == (task, 3)
    listed = gateway.get("/sessions", key=ADMIN_KEY).json()["data"]
    assert {row["task_id"] for row in listed} == {"one", "two"}
    ids = {row["session_id"] for row in listed}
    assert len(ids) == 2
    for stored in ids:
        assert gateway.get(f"/sessions/{stored}", key=ADMIN_KEY).json()["session_id"] == stored
    assert gateway.call("DELETE", "/sessions/a", key=OTHER_KEY).json()["session_id"] == "a"
    assert gateway.get("/sessions/a", key=OTHER_KEY).status_code == 410
    assert gateway.post("/sessions", {"session_id": "a"}, key=OTHER_KEY).status_code == 410
    assert gateway.get("/sessions/a").status_code == 200
    (row,) = gateway.get("/sessions", key=OTHER_KEY).json()["data"]
    assert (row["session_id"], row["verdict"]["code"]) == ("a", "deleted")


def test_a_session_that_was_deleted_does_not_take_its_id_from_other_keys(gateway: RunningGateway) -> None:
    gateway.session(session_id="a")
    assert gateway.call("DELETE", "/sessions/a").status_code == 200
    assert gateway.post("/sessions", {"session_id": "a"}, key=OTHER_KEY).status_code == 201
    assert gateway.get("/sessions/a").status_code == 410


def test_the_second_session_is_used_in_every_way(gateway: RunningGateway) -> None:
    _, second = both(gateway)
    assert second["base_url"] == f"{gateway.url}/sessions/a/v1"
    assert gateway.post("/sessions", {"session_id": "a", "task_id": "two"}, key=OTHER_KEY).status_code == 200
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


def test_the_first_session_may_go_before_the_second(gateway: RunningGateway) -> None:
    both(gateway)
    gateway.chat(headers={"x-session-id": "a"}, key=OTHER_KEY)
    assert gateway.call("DELETE", "/sessions/a").status_code == 200
    gateway.chat(headers={"x-session-id": "a"}, key=OTHER_KEY)
    assert len(gateway.get("/sessions/a", key=OTHER_KEY).json()["turns"]) == 2
