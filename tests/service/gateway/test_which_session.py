"""Which session a call belongs to: the one that is named, or the one whose conversation it continues."""

import json
from typing import Any

import pytest

from tests.support.gateway.examples import CALL_TEXT
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, RunningGateway

CHAT = "/v1/chat/completions"
OWN = "01a20759-28fd-7e22-8294-cfff8c642879"
"""A harness' own id of its conversation."""
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("get", "put")]
HARNESSES: dict[str, dict[str, str]] = {
    "codex": {"session-id": OWN, "thread-id": OWN, "originator": "codex_exec"},
    "opencode": {"x-session-affinity": OWN, "x-session-id": OWN},
    "opencode, earlier": {"x-opencode-session": OWN},
    "claude code": {"x-claude-code-session-id": OWN},
    "litellm": {"x-litellm-trace-id": OWN},
}
STAMPS = [name for name, headers in HARNESSES.items() if not {"session-id", "x-session-id"} & headers.keys()]
"""Harnesses whose headers name a session only where nothing else does."""


def session_of(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.headers["x-weir-session-id"])


def said(gateway: RunningGateway, history: list[Any], **more: Any) -> Any:
    """A call with this conversation; its answer and the user's next message are appended."""
    reply = gateway.post(CHAT, {"messages": history, "tools": TOOLS}, **more)
    history += [reply.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    return reply


def in_messages(gateway: RunningGateway, user_id: str, **more: Any) -> Any:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "metadata": {"user_id": user_id},
    }
    return gateway.post(more.pop("path", "/v1/messages"), body, **more)


# Named


def test_which_session_a_call_belongs_to(gateway: RunningGateway) -> None:
    session = gateway.session()
    name, key = session["session_id"], session["api_key"]
    for reply in (
        gateway.chat(path=f"/sessions/{name}{CHAT}"),
        gateway.chat(key=key),
        gateway.chat(headers={"x-session-id": name}),
        gateway.chat(metadata={"session_id": name}),
    ):
        assert session_of(reply) == name, reply.request


def test_an_unknown_id_makes_the_session(gateway: RunningGateway) -> None:
    gateway.chat(headers={"x-session-id": "fresh"})
    assert gateway.get("/sessions/fresh").json()["inferred"] is False
    assert gateway.post("/sessions", {"session_id": "fresh"}).status_code == 200


@pytest.mark.parametrize("name", HARNESSES)
def test_a_session_that_a_harness_was_given_counts_before_its_own(gateway: RunningGateway, name: str) -> None:
    headers, body = HARNESSES[name], {"input": "hi"}
    assert session_of(gateway.post("/v1/responses", body, headers=headers)) == OWN
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/responses"
    for reply in (
        gateway.post("/v1/responses", body, key=session["api_key"], headers=headers),
        gateway.post(path, body, key=session["api_key"], headers=headers),
        gateway.post(path, body, headers=headers),
    ):
        assert session_of(reply) == session["session_id"], reply.request


@pytest.mark.parametrize("name", STAMPS)
def test_what_a_harness_stamps_on_its_calls_names_a_session_where_nobody_else_does(
    gateway: RunningGateway, name: str
) -> None:
    stamp = HARNESSES[name]
    assert session_of(gateway.chat(headers=stamp)) == OWN
    assert session_of(gateway.chat(headers=stamp | {"x-session-id": "mine"})) == "mine"
    assert session_of(gateway.chat(headers=stamp, metadata={"session_id": "mine"})) == "mine"
    assert gateway.get(f"/sessions/{OWN}").json()["inferred"] is False
    assert session_of(gateway.chat(headers=dict.fromkeys(stamp, "no id / of ours"))) not in (OWN, "mine")


def test_claude_codes_metadata_names_the_session(gateway: RunningGateway) -> None:
    """If it has no session of its own: Claude Code sends the id of its conversation with every call."""
    stamped = json.dumps({"device_id": "d", "account_uuid": "", "session_id": OWN})
    for user_id in (f"user_abc_account__session_{OWN}", stamped):
        assert session_of(in_messages(gateway, user_id)) == OWN, user_id
    session = gateway.session()
    path, key = f"/sessions/{session['session_id']}/v1/messages", session["api_key"]
    for more in ({"key": key}, {"key": key, "path": path}, {"path": path}):
        reply = in_messages(gateway, stamped, headers=HARNESSES["claude code"], **more)
        assert session_of(reply) == session["session_id"], more


def test_a_user_id_without_a_session_names_no_session(gateway: RunningGateway) -> None:
    for user_id in ("user-7", "{}", '{"session_id": 7}', '{"session_id": "a/b"}', "[" * 9999):
        name = session_of(in_messages(gateway, user_id))
        assert gateway.get(f"/sessions/{name}").json()["inferred"] is True, user_id


def test_a_session_key_names_no_other_session_beside_its_own(gateway: RunningGateway) -> None:
    session, other = gateway.session(), gateway.session()["session_id"]
    path = f"/sessions/{session['session_id']}{CHAT}"
    named: list[dict[str, Any]] = [
        *({"headers": {header: other}} for header in ("session-id", "session_id", "x-session-id")),
        {"metadata": {"session_id": other}},
    ]
    for beside in named:
        reply = gateway.chat(path=path, key=session["api_key"], **beside)
        assert (reply.status_code, reply.json()["error"]["type"]) == (403, "permission_error"), beside


def test_a_websocket_is_refused_with_the_status_that_makes_codex_post(gateway: RunningGateway) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    reply = gateway.get("/v1/responses", headers=headers)
    assert (reply.status_code, reply.json()["error"]["type"]) == (426, "invalid_request_error")
    assert reply.headers["allow"] == "POST"
    assert gateway.get("/v1/responses").status_code == 405


# Not named


def test_a_call_that_names_no_session_joins_the_conversation_it_continues(gateway: RunningGateway) -> None:
    history: list[Any] = [{"role": "user", "content": "hi"}]
    name = session_of(said(gateway, history))
    stranger = gateway.post(CHAT, {"messages": history, "tools": TOOLS}, key=OTHER_KEY)
    assert session_of(stranger) != name
    assert session_of(said(gateway, history)) == name
    assert session_of(gateway.chat("hi")) != name
    view = gateway.get(f"/sessions/{name}").json()
    assert view["inferred"] is True
    assert [turn["relation"] for turn in view["turns"]] == ["root", "extends"]


def test_a_call_that_continues_a_named_session_needs_no_name_until_it_is_finished(
    gateway: RunningGateway,
) -> None:
    session = gateway.session()
    history: list[Any] = [{"role": "user", "content": "hi"}]
    said(gateway, history, key=session["api_key"])
    assert session_of(said(gateway, history)) == session["session_id"]
    end = {"status": "completed", "reward": 1.0}
    assert gateway.post(f"/sessions/{session['session_id']}/finish", end).status_code == 200
    assert session_of(said(gateway, history)) != session["session_id"]


@pytest.mark.parametrize("first_again", [True, False])
def test_of_twin_conversations_each_goes_on_in_its_own_session(
    gateway: RunningGateway, first_again: bool
) -> None:
    """The ids of tool calls tell equal texts apart. Without ids, the newest conversation is continued."""
    gateway.engine.script += [CALL_TEXT] * 3

    def go_on(history: list[Any]) -> str:
        reply = gateway.post(CHAT, {"messages": history, "tools": TOOLS})
        history.append(reply.json()["choices"][0]["message"])
        return session_of(reply)

    twins: list[list[Any]] = [[{"role": "user", "content": "value of a?"}] for _ in range(3)]
    names = [go_on(history) for history in twins]
    assert len(set(names)) == 3
    for then in ({"role": "tool", "content": "7", "tool_call_id": "x"}, {"role": "user", "content": "sure?"}):
        order = (0, 1, 2) if first_again else (1, 2, 0)
        for index in order:  # in the second round, the newest answer has no tool call
            twins[index].append(then)
            assert go_on(twins[index]) == names[index]
    for name in names:
        turns = gateway.get(f"/sessions/{name}").json()["turns"]
        assert [turn["relation"] for turn in turns] == ["root", "extends", "extends"]


def test_a_twin_that_is_finished_does_not_send_its_conversation_to_the_other(gateway: RunningGateway) -> None:
    gateway.engine.script += [CALL_TEXT] * 2
    twins: list[list[Any]] = [[{"role": "user", "content": "go"}] for _ in range(2)]
    names = [session_of(said(gateway, history)) for history in twins]
    gateway.post(f"/sessions/{names[0]}/finish", {"status": "completed"})
    assert session_of(said(gateway, twins[0])) not in names


def test_a_call_is_of_the_session_that_it_continues_longest_whatever_ids_it_carries(
    gateway: RunningGateway,
) -> None:
    gateway.engine.script.append(CALL_TEXT)
    history: list[Any] = [{"role": "user", "content": "go"}]
    said(gateway, history)
    said(gateway, history, headers={"x-session-id": "copy"})
    assert session_of(said(gateway, history)) == "copy"


# Two client keys may give their sessions the same id, and neither hears of the other's


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
        assert (view["task_id"], len(view["turns"])) == (task, 3), key
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
    assert session_of(gateway.chat(headers={"x-session-id": "a"}, key=OTHER_KEY)) == "a"
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
