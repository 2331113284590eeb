"""`curl` uses the same routes without any SDK."""

from tests.support.clients.stack import RunningStack

CLIENT = "curl"


def test_a_chat_call_is_recorded(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "chat", session)["choices"][0]["message"]["content"] == "unknown"
    assert session.story() == [("root", "stop")]


def test_a_stream_ends_with_its_reason(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "stream", session)["choices"][0]["finish_reason"] == "stop"
    assert session.story() == [("root", "stop")]


def test_a_message_is_recorded(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "messages", session)
    assert (said["content"][0]["text"], said["stop_reason"]) == ("unknown", "end_turn")
    assert session.story() == [("root", "stop")]


def test_a_header_names_a_session_that_nobody_opened(stack: RunningStack) -> None:
    stack.play(CLIENT, "by_header", None, SESSION_ID="by-curl")
    (session,) = [session for session in stack.sessions() if session.session_id == "by-curl"]
    assert session.story() == [("root", "stop")]
    assert session.view()["inferred"] is False
