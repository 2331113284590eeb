"""Mistakes in requests are answered by a sentence that says what to do."""

import re
from typing import Any

import pytest

from tests.support.gateway.running import CLIENT_KEY, RunningGateway
from tests.support.mistakes import mistakes_at

DONE = {"status": "completed", "reward": 1.0}


def opened(gateway: RunningGateway, name: str) -> str:
    """The id of a session: `session` without a call, `called` with one, `finished` ended as well."""
    session = gateway.session()
    session_id = str(session["session_id"])
    if name != "session":
        assert gateway.chat(session=session).status_code == 200
    if name == "finished":
        assert gateway.post(f"/sessions/{session_id}/finish", DONE).status_code == 200
    return session_id


@pytest.mark.parametrize("given", mistakes_at("request"))
def test_the_answer_says_what_to_do(given: dict[str, Any], gateway: RunningGateway) -> None:
    method, path = given["request"].split()
    answer = given["answer"]
    for name in re.findall(r"{(\w+)}", path):
        session_id = opened(gateway, name)
        path, answer = (text.replace(f"{{{name}}}", session_id) for text in (path, answer))
    body = given.get("body", {})
    if "LONG" in str(body):
        body = {"messages": [{"role": "user", "content": "word " * 6000}]}
    sent: dict[str, Any] = {"content": given["content"]} if "content" in given else {"json": body}
    key = given.get("key", CLIENT_KEY)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    reply = gateway.http.request(method, gateway.url + path, headers=headers, **sent)
    assert reply.status_code == given["status"], reply.text
    told = reply.json()
    said = told["error"]["message"] if "error" in told else reply.text
    assert re.search(answer, said), said
