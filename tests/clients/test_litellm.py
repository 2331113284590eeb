"""`litellm` as a library: its OpenAI and its Anthropic providers."""

from tests.support.clients.stack import RunningStack

CLIENT = "litellm"
CALLED_THEN_ANSWERED = [("root", "tool_calls"), ("extends", "stop")]


def test_a_tool_loop_is_one_branch(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "tool_loop", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED
    assert session.end(reward=1.0) == "ready"


def test_two_calls_at_once_are_one_turn(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "parallel_calls", session) == {"answer": "7 3"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_header_names_the_session(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "named_by_header", None, SESSION_ID=session.session_id)
    assert said == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_streamed_tool_loop_is_recorded_as_a_plain_one(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "stream", session) == {"answer": "7", "finish": "stop"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_an_asynchronous_call_counts_what_was_recorded(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "asynchronous", session)
    (turn,) = session.turns()
    assert said == {"finish": "tool_calls", "tokens": turn["output_len"]}


def test_the_anthropic_provider_calls_messages(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "anthropic_protocol", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_errors_are_the_sdks_own(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "errors", session) == {
        "bad_value": ["BadRequestError", 400],
        "bad_key": ["AuthenticationError", 401],
        "no_such_version": ["NotFoundError", 404],
    }
    assert session.story() == []
