"""Sessions, groups, rewards and verdicts over HTTP."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway.running import ADMIN_KEY, OTHER_KEY, RunningGateway
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until


def turn_in(gateway: RunningGateway, session: dict[str, Any]) -> Any:
    return gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")


def test_a_session_goes_straight_into_a_client(gateway: RunningGateway) -> None:
    session = gateway.session(task_id="t", metadata={"a": 1})
    assert session["base_url"] == f"{gateway.url}/sessions/{session['session_id']}/v1"
    assert (session["state"], session["task_id"]) == ("open", "t")
    assert session["expires_at"] == session["created_at"] + 3600


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_ticket_names_the_address_that_a_proxy_was_asked_for(gateway: RunningGateway, address: str) -> None:
    """The IP address of the proxy does not matter."""
    asked = {"x-forwarded-proto": "https", "host": "weir.example"}
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=120) as gateway.http:
        ticket = gateway.post("/sessions", headers=asked).json()
    assert ticket["base_url"] == f"https://weir.example/sessions/{ticket['session_id']}/v1"


def test_the_same_session_again_is_the_same_and_another_body_is_409(gateway: RunningGateway) -> None:
    first = gateway.session(session_id="mine", task_id="t")
    again = gateway.post("/sessions", {"session_id": "mine", "task_id": "t", "user": None})
    assert (again.status_code, again.json()["api_key"]) == (200, first["api_key"])
    assert gateway.post("/sessions", {"session_id": "mine", "task_id": "u"}).status_code == 409


@pytest.mark.parametrize(
    "body",
    [
        {"session_id": ".."},
        {"session_id": "a/b"},
        {"session_id": "x" * 201},
        {"ttl_s": -1},
        {"ttl_s": "soon"},
        {"train": "yes"},
        {"sampling": {"temperature": 9}},
        {"sampling": {"mode": "sometimes"}},
        {"group_size": 4},
        {"colour": "blue"},
        [],
    ],
)
def test_a_bad_session_is_400(gateway: RunningGateway, body: Any) -> None:
    reply = gateway.post("/sessions", body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_group_is_one_task_sampled_size_times(gateway: RunningGateway) -> None:
    reply = gateway.post("/groups", {"size": 3, "group_id": "g", "task_id": "t"})
    sessions = reply.json()["sessions"]
    assert (reply.status_code, len(sessions)) == (201, 3)
    assert {(s["group_id"], s["task_id"]) for s in sessions} == {("g", "t")}
    assert gateway.post("/groups", {"size": 3, "group_id": "g"}).status_code == 409
    assert gateway.post("/groups", {"size": 3, "session_id": "x"}).status_code == 400
    assert gateway.post("/groups", {"size": 0}).status_code == 400
    assert gateway.post("/sessions", {"group_id": "g"}).status_code == 409


def test_which_session_a_call_belongs_to(gateway: RunningGateway) -> None:
    session = gateway.session()
    by_path = turn_in(gateway, session)
    by_key = gateway.chat(key=session["api_key"])
    by_header = gateway.chat(headers={"x-session-id": session["session_id"]})
    by_metadata = gateway.chat(metadata={"session_id": session["session_id"]})
    for reply in (by_path, by_key, by_header, by_metadata):
        assert reply.headers["x-weir-session-id"] == session["session_id"], reply.text


def test_an_unknown_id_makes_the_session(gateway: RunningGateway) -> None:
    gateway.chat(headers={"x-session-id": "fresh"})
    assert gateway.get("/sessions/fresh").json()["inferred"] is False
    assert gateway.post("/sessions", {"session_id": "fresh"}).status_code == 200


def test_a_call_that_names_no_session_joins_the_conversation_it_continues(gateway: RunningGateway) -> None:
    first = gateway.chat("hi")
    name = first.headers["x-weir-session-id"]
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]},
        {"role": "tool", "content": "more", "tool_call_id": "c"},
    ]
    second = gateway.post("/v1/chat/completions", {"messages": history})
    assert second.headers["x-weir-session-id"] == name
    assert gateway.chat("hi").headers["x-weir-session-id"] != name
    view = gateway.get(f"/sessions/{name}").json()
    assert view["inferred"] is True
    assert [turn["relation"] for turn in view["turns"]] == ["root", "extends"]


def test_a_call_that_continues_a_session_by_its_conversation_needs_no_name(gateway: RunningGateway) -> None:
    session = gateway.session()
    turn_in(gateway, session)
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    more = {"messages": [*history, {"role": "user", "content": "more"}]}
    joined = gateway.post("/v1/chat/completions", more)
    assert joined.headers["x-weir-session-id"] == session["session_id"]
    stranger = gateway.post("/v1/chat/completions", more, key=OTHER_KEY)
    assert stranger.headers["x-weir-session-id"] != session["session_id"]


def test_a_conversation_whose_session_is_finished_goes_on_in_a_new_one(gateway: RunningGateway) -> None:
    name = gateway.chat("hi").headers["x-weir-session-id"]
    gateway.post(f"/sessions/{name}/finish", {"status": "completed", "reward": 1.0})
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    reply = gateway.post(
        "/v1/chat/completions", {"messages": [*history, {"role": "user", "content": "more"}]}
    )
    assert reply.status_code == 200
    assert reply.headers["x-weir-session-id"] != name


@pytest.mark.parametrize("first_again", [True, False])
def test_of_twin_conversations_each_goes_on_in_its_own_session(
    gateway: RunningGateway, first_again: bool
) -> None:
    """The ids of tool calls tell equal texts apart. Without ids, the newest conversation is continued."""
    call = '<tool_call>\n{"name": "get", "arguments": {"key": "c"}}\n</tool_call>'
    gateway.engine.script += [call] * 3
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    question = {"role": "user", "content": "value of c?"}

    def go_on(history: list[Any]) -> str:
        reply = gateway.post("/v1/chat/completions", {"messages": history, "tools": tools})
        history.append(reply.json()["choices"][0]["message"])
        return str(reply.headers["x-weir-session-id"])

    twins: list[list[Any]] = [[question], [question], [question]]
    names = [go_on(history) for history in twins]
    assert len(set(names)) == 3
    for said in ({"role": "tool", "content": "7", "tool_call_id": "x"}, {"role": "user", "content": "sure?"}):
        order = (0, 1, 2) if first_again else (1, 2, 0)
        for index in order:  # in the second round, the newest answer has no tool call
            twins[index].append(said)
            assert go_on(twins[index]) == names[index]
    for name in names:
        turns = gateway.get(f"/sessions/{name}").json()["turns"]
        assert [turn["relation"] for turn in turns] == ["root", "extends", "extends"]


def test_a_twin_that_is_finished_does_not_send_its_conversation_to_the_other(gateway: RunningGateway) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    gateway.engine.script += [call] * 2
    question = {"role": "user", "content": "go"}
    one, other = (gateway.post("/v1/chat/completions", {"messages": [question]}) for _ in range(2))
    names = [reply.headers["x-weir-session-id"] for reply in (one, other)]
    gateway.post(f"/sessions/{names[0]}/finish", {"status": "completed"})
    history = [question, one.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    reply = gateway.post("/v1/chat/completions", {"messages": history})
    assert reply.status_code == 200
    assert reply.headers["x-weir-session-id"] not in names


def test_a_call_is_of_the_session_that_it_continues_longest_whatever_ids_it_carries(
    gateway: RunningGateway,
) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    gateway.engine.script.append(call)
    history: list[Any] = [{"role": "user", "content": "go"}]
    first = gateway.post("/v1/chat/completions", {"messages": history})
    history += [first.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
    named = gateway.post("/v1/chat/completions", {"messages": history}, headers={"x-session-id": "copy"})
    history += [named.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    reply = gateway.post("/v1/chat/completions", {"messages": history})
    assert reply.headers["x-weir-session-id"] == "copy"


@pytest.mark.parametrize("header", ["x-claude-code-session-id", "x-opencode-session", "x-litellm-trace-id"])
def test_what_a_harness_stamps_on_its_calls_names_a_session_where_nobody_else_does(
    gateway: RunningGateway, header: str
) -> None:
    stamp = {header: "run-17"}
    assert gateway.chat(headers=stamp).headers["x-weir-session-id"] == "run-17"
    named = gateway.chat(headers=stamp | {"x-session-id": "mine"})
    assert named.headers["x-weir-session-id"] == "mine"
    in_body = gateway.chat(headers=stamp, metadata={"session_id": "mine"})
    assert in_body.headers["x-weir-session-id"] == "mine"
    assert gateway.get("/sessions/run-17").json()["inferred"] is False
    odd = gateway.chat(headers={header: "no id / of ours"})
    assert odd.status_code == 200


@pytest.mark.parametrize("where", ["headers", "metadata"])
def test_a_session_key_names_no_other_session_beside_its_own(gateway: RunningGateway, where: str) -> None:
    session, other = gateway.session(), gateway.session()["session_id"]
    named: dict[str, Any] = {"headers": {"x-session-id": other}, "metadata": {"session_id": other}}
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    reply = gateway.chat(path=path, key=session["api_key"], **{where: named[where]})
    assert (reply.status_code, reply.json()["error"]["type"]) == (403, "permission_error")


def test_a_session_key_opens_its_calls_and_nothing_else(gateway: RunningGateway) -> None:
    session, other = gateway.session(), gateway.session()
    key = session["api_key"]
    path = f"/sessions/{session['session_id']}"
    assert (
        gateway.chat(key=key, path=f"/sessions/{other['session_id']}/v1/chat/completions").status_code == 403
    )
    assert gateway.post(f"{path}/reward", {"value": 1}, key=key).status_code == 403
    assert gateway.get(path, key=key).status_code == 403
    assert gateway.get("/admin/status", key=key).status_code == 403


def test_another_client_does_not_see_a_session(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}"
    assert gateway.get(path, key=OTHER_KEY).status_code == 404
    assert gateway.post(f"{path}/reward", {"value": 1}, key=OTHER_KEY).status_code == 404
    # A call opens the session that it names; with this key, that is another session of the same id.
    assert gateway.chat(key=OTHER_KEY, path=f"{path}/v1/chat/completions").status_code == 200
    assert gateway.get(path, key=ADMIN_KEY).json()["turns"] == []


@pytest.mark.parametrize("path", ["", "/reward", "/finish"])
def test_an_unknown_session_is_404(gateway: RunningGateway, path: str) -> None:
    body = {"value": 1.0} if path == "/reward" else {"status": "completed"}
    reply = gateway.post(f"/sessions/nobody{path}", body) if path else gateway.get("/sessions/nobody")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def test_rewards_add_up_and_a_key_counts_once(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/reward"
    assert gateway.post(path, {"value": 0.5, "key": "a"}).json()["reward"] == 0.5
    assert gateway.post(path, {"value": 0.5, "key": "a"}).json()["reward"] == 0.5
    reply = gateway.post(path, {"value": 0.25, "source": "judge"}).json()
    assert (reply["reward"], reply["late"], reply["rewards"][1]["source"]) == (0.75, False, "judge")
    assert gateway.post(path, {"value": 0.6, "key": "a"}).status_code == 409


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"1"', "null", "true", "1e999"])
def test_a_reward_is_a_finite_number(gateway: RunningGateway, value: str) -> None:
    session = gateway.session()
    reply = gateway.call(
        "POST",
        f"/sessions/{session['session_id']}/reward",
        headers={"content-type": "application/json"},
        content=f'{{"value": {value}}}'.encode(),
    )
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert gateway.get(f"/sessions/{session['session_id']}").json()["reward"] is None


def test_rewards_whose_sum_is_not_finite_are_refused(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}/reward"
    assert gateway.post(path, {"value": 1.7e308}).status_code == 200
    assert gateway.post(path, {"value": 1.7e308}).status_code == 400


def test_a_reward_may_credit_one_call(gateway: RunningGateway) -> None:
    session = gateway.session()
    completion = turn_in(gateway, session)
    turn_id = completion.headers["x-weir-turn-id"]
    path = f"/sessions/{session['session_id']}/reward"
    for name in (turn_id, completion.json()["id"]):
        assert gateway.post(path, {"value": 1.0, "turn_id": name}).status_code == 200
    assert gateway.post(path, {"value": 1.0, "turn_id": "other"}).status_code == 404
    (turn,) = gateway.get(f"/sessions/{session['session_id']}").json()["turns"]
    assert turn["reward"] == 2.0


def test_the_id_of_a_completion_with_several_choices_credits_none_of_them(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}"
    completion = gateway.chat(path=f"{path}/v1/chat/completions", n=2).json()
    refused = gateway.post(f"{path}/reward", {"value": 1.0, "turn_id": completion["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "ambiguous_turn")
    turns = gateway.get(path).json()["turns"]
    assert {turn["completion_id"] for turn in turns} == {completion["id"]}
    assert gateway.post(f"{path}/reward", {"value": 1.0, "turn_id": turns[0]["turn_id"]}).status_code == 200


def test_a_finished_session_waits_for_its_reward_and_takes_no_call(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}"
    turn_in(gateway, session)
    finished = gateway.post(f"{path}/finish", {"status": "completed"}).json()
    assert (finished["state"], finished["verdict"]["code"]) == ("waiting_reward", "waiting_reward")
    refused = turn_in(gateway, session)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_finished")
    gateway.post(f"{path}/reward", {"value": 1.0})
    assert gateway.get(path).json()["verdict"]["code"] == "ready"


def test_a_client_does_not_ask_again_where_that_changes_nothing(gateway: RunningGateway) -> None:
    """By default, OpenAI's and Anthropic's SDKs retry a 409; a header tells them not to."""
    session = gateway.session()
    gateway.post(f"/sessions/{session['session_id']}/finish", {"status": "completed"})
    asked: list[Any] = []
    with openai.DefaultHttpxClient(event_hooks={"request": [asked.append]}) as http:
        client = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], http_client=http)
        with pytest.raises(openai.ConflictError) as refused:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "session_finished"
    assert len(asked) == 1


def test_finishing_twice_alike_is_200_and_otherwise_409(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}/finish"
    assert gateway.post(path, {"status": "completed", "reward": 1.0}).status_code == 200
    assert gateway.post(path, {"status": "completed", "reward": 1.0}).status_code == 200
    assert gateway.post(path, {"status": "failed"}).status_code == 409
    assert gateway.post(path, {"status": "completed", "reward": 0.0}).status_code == 409
    assert gateway.post(path, {"status": "done"}).status_code == 400


def test_the_reward_of_finish_has_the_key_finish(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    gateway.post(f"{path}/reward", {"value": 1.0, "key": "finish"})
    assert gateway.post(f"{path}/finish", {"status": "completed", "reward": 2.0}).status_code == 409
    assert gateway.get(path).json()["state"] == "open"
    assert gateway.post(f"{path}/finish", {"status": "completed", "reward": 1.0}).json()["reward"] == 1.0


def test_a_session_whose_reward_was_called_finish_may_finish_without_another(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    gateway.post(f"{path}/reward", {"value": 1.0, "key": "finish"})
    assert gateway.post(f"{path}/finish", {"status": "completed"}).status_code == 200


def test_the_largest_reward_may_be_said_twice(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    for _ in range(2):
        assert gateway.post(f"{path}/reward", {"value": 1.7e308, "key": "a"}).status_code == 200


def test_a_finished_and_rewarded_session_does_not_expire(timed: RunningGateway, turned: TurnedClock) -> None:
    rewarded, bystander = timed.session(ttl_s=60), timed.session(ttl_s=60)
    path = f"/sessions/{rewarded['session_id']}"
    timed.post(f"{path}/finish", {"status": "completed", "reward": 1.0})
    turned.turn(60)
    other = f"/sessions/{bystander['session_id']}"
    wait_until(lambda: timed.get(other).json()["verdict"]["code"] == "expired")
    assert timed.get(path).json()["verdict"]["code"] == "ready"


@pytest.mark.parametrize("status", ["failed", "abandoned"])
def test_failed_and_abandoned_end_at_once(gateway: RunningGateway, status: str) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    verdict = gateway.post(f"{path}/finish", {"status": status, "reason": "boom"}).json()["verdict"]
    assert (verdict["code"], verdict["detail"]) == (status, "boom")
    assert gateway.post(f"{path}/reward", {"value": 1.0}).json()["late"] is True


def test_an_incomplete_group_says_what_is_missing(gateway: RunningGateway) -> None:
    sessions = gateway.post("/groups", {"size": 2, "group_id": "g"}).json()["sessions"]
    path = f"/sessions/{sessions[0]['session_id']}"
    gateway.post(f"{path}/finish", {"status": "completed", "reward": 1.0})
    verdict = gateway.get(path).json()["verdict"]
    assert verdict["code"] == "group_incomplete"
    assert "1 of 2" in verdict["detail"]


def test_an_expired_session_says_so(gateway: RunningGateway) -> None:
    session = gateway.session(ttl_s=0.2)
    path = f"/sessions/{session['session_id']}"
    wait_until(lambda: gateway.get(path).json()["verdict"]["code"] == "expired")
    refused = turn_in(gateway, session)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_expired")
    assert refused.headers["x-should-retry"] == "false"


def test_sessions_are_listed_filtered_and_paged(gateway: RunningGateway) -> None:
    for index in range(5):
        session = gateway.session(user="u" if index % 2 else "v")
        turn_in(gateway, session)
    gateway.session()
    gateway.post("/sessions", {}, key=OTHER_KEY)
    first = gateway.get("/sessions?limit=2&user=v").json()
    rest = gateway.get(f"/sessions?limit=2&user=v&cursor={first['next_cursor']}").json()
    rows = first["data"] + rest["data"]
    assert [(row["user"], row["turn_count"], "turns" in row) for row in rows] == [("v", 1, False)] * 3
    assert rest["next_cursor"] is None
    assert len(gateway.get("/sessions").json()["data"]) == 6
    assert len(gateway.get("/sessions?verdict=trained").json()["data"]) == 0
    for bad in ("limit=0", "limit=1001", "state=odd", "verdict=odd", "cursor=x"):
        assert gateway.get(f"/sessions?{bad}").status_code == 400, bad


def test_text_and_tokens_on_request(gateway: RunningGateway) -> None:
    session = gateway.session()
    turn_in(gateway, session)
    path = f"/sessions/{session['session_id']}"
    assert "context_ids" not in gateway.get(path).json()["turns"][0]
    (turn,) = gateway.get(f"{path}?text=true").json()["turns"]
    assert turn["output_text"] == "hello<|im_end|>"
    assert turn["message"].pop("tool_calls") == []
    assert turn["message"] == {"role": "assistant", "content": "hello", "reasoning_content": None}


def test_a_session_shows_its_metadata_and_the_tools_that_a_turn_calls(gateway: RunningGateway) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    gateway.engine.script.append(f"Well.\n{call}")
    session = gateway.session(metadata={"grader": "sums", "deep": {"x": [1]}})
    turn_in(gateway, session)
    shown = gateway.get(f"/sessions/{session['session_id']}?text=true").json()
    assert shown["metadata"] == {"grader": "sums", "deep": {"x": [1]}}
    (row,) = gateway.get("/sessions").json()["data"]
    assert row["metadata"] == shown["metadata"]
    assert (row["group_size"], shown["group_size"]) == (None, None)
    gateway.post("/groups", {"size": 2})
    assert [each["group_size"] for each in gateway.get("/sessions").json()["data"][1:]] == [2, 2]
    message = shown["turns"][0]["message"]
    assert message["content"] == "Well."
    (called,) = message["tool_calls"]
    assert (called["type"], called["function"]["name"]) == ("function", "add")
    assert json.loads(called["function"]["arguments"]) == {"a": 1}


def test_keys_are_stored_nowhere(gateway: RunningGateway) -> None:
    session = gateway.session()
    turn_in(gateway, session)
    for name in gateway.redis.scan_iter():
        value = gateway.redis.dump(name) or b""
        assert b"client-key" not in value
        assert session["api_key"].encode() not in value
