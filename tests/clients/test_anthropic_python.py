"""`anthropic` for Python uses the Messages API: plain, streamed, and through the SDK's tool runner."""

from tests.support.clients.stack import RunningStack

CLIENT = "anthropic_python"
CALLED_THEN_ANSWERED = [("root", "tool_calls"), ("extends", "stop")]


def test_a_tool_loop_is_one_branch(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "tool_loop", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED
    assert session.end(reward=1.0) == "ready"


def test_two_calls_at_once_are_one_turn(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "parallel_calls", session)
    assert said == {"answer": "7 3", "calls": [{"key": "c"}, {"key": "d"}]}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_conversation_whose_cache_mark_moves_is_one_branch(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "conversation", session) == {"answers": ["7", "3"]}
    assert [relation for relation, _ in session.story()] == ["root", "extends", "extends", "extends"]


def test_the_streamed_events_make_the_message(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "stream", session)
    assert (said["answer"], said["streamed"]) == ("7 3", "7 3")
    assert {"message_start", "content_block_stop", "input_json", "message_stop"} <= set(said["events"])
    assert said["usage"] == [True, True]
    assert session.story() == CALLED_THEN_ANSWERED


def test_the_sdks_tool_runner_runs_to_the_end(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "tool_runner", session) == {"answer": "3"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_metadata_names_the_session_as_in_claude_code(stack: RunningStack) -> None:
    said = stack.play(CLIENT, "named_by_user")
    assert said["answer"] == "7"
    (session,) = [session for session in stack.sessions() if session.session_id == said["session_id"]]
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_tool_can_be_demanded(stack: RunningStack) -> None:
    assert stack.play(CLIENT, "forced_tool", stack.session()) == {"called": ["get", "get"]}


def test_an_answer_can_be_parsed(stack: RunningStack) -> None:
    said = stack.play(CLIENT, "parsed", stack.session())
    assert set(said["parsed"]) == {"digit", "even"}


def test_tokens_are_counted_as_they_are_used(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "count_tokens", session)
    (turn,) = session.turns()
    assert said["counted"] == said["used"] == turn["context_len"]


def test_errors_are_the_sdks_own(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "errors", session) == {
        "bad_value": ["BadRequestError", "invalid_request_error", "error", True],
        "image": ["BadRequestError", "invalid_request_error", "error", True],
        "bad_key": ["AuthenticationError", "authentication_error", "error", True],
        "no_such_version": ["NotFoundError", "not_found_error", "error", True],
    }
    assert session.story() == []
