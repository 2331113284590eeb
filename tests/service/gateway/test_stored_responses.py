"""Stored responses over HTTP: they are read, listed and deleted by their owner, with the official client."""

import json
from typing import Any

import openai
import pytest

from rollout_queue.redis import key_names
from tests.support.gateway.examples import CALL_TEXT
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, RunningGateway

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get",
    "description": "looks a key up " * 60,
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    "strict": False,
}


def created(gateway: RunningGateway, session: dict[str, Any], stream: bool = False, **body: Any) -> Any:
    client = gateway.client(session)
    if not stream:
        return client.responses.create(model="m", **body)
    with client.responses.stream(model="m", **body) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_read_as_it_was_told(gateway: RunningGateway, stream: bool) -> None:
    gateway.engine.script.append("<think>\nwhich?\n</think>\n\nlet me see" + CALL_TEXT)
    session = gateway.session()
    body: Any = {
        "instructions": "be kind",
        "tools": [TOOL],
        "metadata": {"run": "7"},
        "max_output_tokens": 99,
    }
    reply = gateway.post(PATH, body | {"input": "a?", "stream": stream}, key=session["api_key"])
    told = json.loads(reply.text.strip().split("data: ")[-1])["response"] if stream else reply.json()
    assert gateway.get(f"{PATH}/{told['id']}").json() == told
    read = gateway.client(session).responses.retrieve(told["id"])
    assert [item.type for item in read.output] == ["reasoning", "message", "function_call"]
    assert (read.instructions, read.metadata, len(read.tools)) == ("be kind", {"run": "7"}, 1)


def test_a_conversation_is_read_link_by_link_and_stored_once(gateway: RunningGateway) -> None:
    session = gateway.session()
    told: list[Any] = []
    for number in range(4):
        asked: dict[str, Any] = {"tools": [TOOL], "instructions": "be kind" if number < 3 else "be brief"}
        last = told[-1].id if told else None
        text = f"number {number} " + "word " * 100
        told.append(created(gateway, session, input=text, previous_response_id=last, **asked))
    client = gateway.client(session)
    for each in told:
        assert client.responses.retrieve(each.id).to_dict() == each.to_dict()
    kept: list[Any] = [gateway.redis.get(name) for name in gateway.redis.scan_iter(key_names.response("*"))]
    assert sum(b"looks a key up" in each for each in kept) == 2  # again with other instructions
    assert sum(b"number 0" in each for each in kept) == 1


def test_the_input_of_a_response_is_listed_in_pages(gateway: RunningGateway) -> None:
    gateway.engine.script.extend([CALL_TEXT, "seven"])
    session = gateway.session()
    first = created(gateway, session, input="value of a?", tools=[TOOL])
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a = 7"}
    second = created(gateway, session, input=[result], tools=[TOOL], previous_response_id=first.id)
    client = gateway.client(session)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    question, called, answered = (item.to_dict() for item in items)
    assert question["content"] == [{"type": "input_text", "text": "value of a?"}]
    assert called == call.to_dict()
    assert (answered["call_id"], answered["output"]) == (call.call_id, "a = 7")
    newest = client.responses.input_items.list(second.id, limit=1)
    assert (newest.data[0].to_dict(), newest.has_more) == (answered, True)
    (only,) = client.responses.input_items.list(first.id).data
    assert only.to_dict() == question
    client.responses.create(  # the listed items are found by their ids
        model="m",
        input=[{"type": "item_reference", "id": str(item.to_dict()["id"])} for item in items],
        tools=[TOOL],
    )
    assert gateway.engine.requests[-1]["input_ids"] == gateway.engine.requests[-2]["input_ids"]


def test_a_deleted_response_is_gone_and_its_turn_stays(gateway: RunningGateway) -> None:
    session = gateway.session()
    first = created(gateway, session, input="hi")
    second = created(gateway, session, input="and?", previous_response_id=first.id)
    client = gateway.client(session)
    reply = gateway.call("DELETE", f"{PATH}/{first.id}", key=session["api_key"])
    assert reply.json() == {"id": first.id, "object": "response", "deleted": True}
    for gone in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.input_items.list(second.id),
        lambda: client.responses.create(model="m", input="so?", previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError):
            gone()
    assert len(gateway.turns(session)) == 2


def test_a_response_is_there_for_its_owner_alone(gateway: RunningGateway) -> None:
    mine, other = gateway.session(), gateway.session()
    told = created(gateway, mine, input="hi")
    inside = f"/sessions/{mine['session_id']}{PATH}/{told.id}"
    elsewhere = f"/sessions/{other['session_id']}{PATH}/{told.id}"
    for path in (f"{PATH}/{told.id}", f"{PATH}/{told.id}/input_items", inside):
        for key in (mine["api_key"], CLIENT_KEY, ADMIN_KEY):
            assert gateway.get(path, key=key).status_code == 200, (path, key)
        assert gateway.get(path, key=OTHER_KEY).status_code == 404
        assert gateway.get(path, key=other["api_key"]).status_code == (403 if path == inside else 404)
        assert gateway.get(path, key=None).status_code == 401
    assert gateway.get(elsewhere).status_code == 404
    for key in (OTHER_KEY, other["api_key"]):
        assert gateway.call("DELETE", f"{PATH}/{told.id}", key=key).status_code == 404
    assert gateway.get(f"{PATH}/{told.id}").status_code == 200
    more = {"input": "and?", "previous_response_id": told.id}
    for key in (OTHER_KEY, other["api_key"]):
        assert gateway.post(PATH, more, key=key).status_code == 404, key
    for key in (mine["api_key"], CLIENT_KEY):
        reply = gateway.post(PATH, more, key=key)
        assert reply.headers["x-weir-session-id"] == mine["session_id"], key


def test_an_unknown_response_is_a_404(gateway: RunningGateway) -> None:
    for unknown in ("resp_" + "0" * 32, "resp_none", "%C3%A9"):
        for more in ("", "/input_items"):
            error = gateway.get(f"{PATH}/{unknown}{more}").json()["error"]
            assert (error["type"], error["code"]) == ("not_found_error", "response_not_found"), unknown + more


UNSERVED = [
    ("?stream=true", "stream"),
    ("?include[]=message.output_text.logprobs", "include[]"),
    ("?starting_after=3", "starting_after"),
    ("/input_items?limit=0", "limit"),
    ("/input_items?order=up", "order"),
    ("/input_items?before=x", "before"),
    ("/input_items?after=msg_1", "after"),
]


def test_a_parameter_that_is_not_served_is_a_400(gateway: RunningGateway) -> None:
    told = created(gateway, gateway.session(), input="hi")
    for query, param in UNSERVED:
        reply = gateway.get(f"{PATH}/{told.id}{query}")
        assert reply.status_code == 400, (query, reply.text)
        assert reply.json()["error"]["param"].endswith(param), query
