"""The main line of a session, whichever call comes first."""

from typing import Any

from tests.support.gateway.running import RunningGateway

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("get", "put")]


def test_a_title_that_comes_first_does_not_make_the_conversation_a_sub_agent(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"

    def said(system: str, text: str, tools: Any = None) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return gateway.post(path, {"messages": messages, **({"tools": tools} if tools else {})})

    said("write a title", "fix the bug")
    said("you are an agent", "fix the bug, please, and say what it was", TOOLS)
    said("write a title", "another")
    said("you search", "where is it?", TOOLS[:1])
    said("you are an agent", "now something else", TOOLS)
    reasons = [turn["reason"] for turn in gateway.turns(session)]
    assert reasons == [None, "main_line", "sub_agent", "sub_agent", "new_conversation"]
