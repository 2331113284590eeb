"""`openai-agents` with its default model class, which uses the Responses API."""

from tests.support.clients.stack import RunningStack

CLIENT = "openai_agents"
CALLED_THEN_ANSWERED = [("root", "tool_calls"), ("extends", "stop")]
ITEMS = ["tool_call_item", "tool_call_output_item", "message_output_item"]


def test_a_run_is_one_branch(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "tool_loop", session) == {"answer": "7", "items": ITEMS, "requests": 2}
    assert session.story() == CALLED_THEN_ANSWERED
    assert session.end(reward=1.0) == "ready"


def test_two_calls_at_once_are_one_turn(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "parallel_calls", session)
    assert said["answer"] == "7 3"
    assert said["items"].count("tool_call_item") == 2
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_streamed_run_is_recorded_as_a_plain_one(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "streamed", session)
    assert (said["answer"], said["streamed"]) == ("7", "7")
    assert {"response.created", "response.function_call_arguments.done", "response.completed"} <= set(
        said["events"]
    )
    assert session.story() == CALLED_THEN_ANSWERED


def test_history_that_the_sdk_keeps_extends_the_session(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "memory", session) == {"answers": ["7", "3"]}
    assert [relation for relation, _ in session.story()] == ["root", "extends", "extends", "extends"]


def test_history_that_the_server_keeps_extends_the_session(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "previous_response", session) == {"answers": ["7", "3"]}
    assert [relation for relation, _ in session.story()] == ["root", "extends", "extends", "extends"]


def test_a_tool_can_be_demanded(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "forced_tool", session) == {"answer": "7", "items": ITEMS}


def test_an_answer_can_be_parsed(stack: RunningStack) -> None:
    said = stack.play(CLIENT, "parsed", stack.session())
    assert set(said["parsed"]) == {"digit", "even"}


def test_a_handoff_is_a_branch_of_its_own(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "handoff", session)
    assert said["last_agent"] == "Helper"
    first, second, *_ = session.story()
    assert (first[0], second[0]) == ("root", "forks")


def test_errors_are_the_sdks_own(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "errors", session) == {
        "bad_value": ["BadRequestError", "invalid_request_error", None],
        "no_such_version": ["NotFoundError", "not_found_error", "model_not_found"],
    }
    assert session.story() == []
