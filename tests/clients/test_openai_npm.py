"""npm's `openai` under Node: its stream helpers and its tool runner."""

from tests.support.clients.stack import RunningStack

CLIENT = "openai_npm"
CALLED_THEN_ANSWERED = [("root", "tool_calls"), ("extends", "stop")]


def test_a_tool_loop_is_one_branch(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "tool_loop", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_the_tool_runner_runs_two_calls(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "run_tools", session) == {"answer": "7 3"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_the_streaming_tool_runner_puts_the_deltas_together(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "run_tools_streamed", session) == {"answer": "7", "deltas": "7"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_stream_counts_what_was_recorded(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "stream", session)
    (turn,) = session.turns()
    assert said == {"text": "unknown", "finish": "stop", "completion_tokens": turn["output_len"]}


def test_responses_continue_by_id(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "responses", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_errors_are_the_sdks_own(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "errors", session) == {
        "bad_value": ["BadRequestError", "invalid_request_error", None, True],
        "bad_key": ["AuthenticationError", "authentication_error", None, True],
        "no_such_version": ["NotFoundError", "not_found_error", "model_not_found", True],
    }
    assert session.story() == []
