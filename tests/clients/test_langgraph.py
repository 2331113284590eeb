"""LangChain and LangGraph: ReAct agents over `ChatOpenAI`, invoked and streamed."""

from tests.support.clients.stack import RunningStack

CLIENT = "langgraph"
CALLED_THEN_ANSWERED = [("root", "tool_calls"), ("extends", "stop")]
MESSAGES = ["human", "ai", "tool", "ai"]


def test_an_invoked_agent_is_one_branch(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "invoke", session) == {"answer": "7", "messages": MESSAGES}
    assert session.story() == CALLED_THEN_ANSWERED
    assert session.end(reward=1.0) == "ready"


def test_two_calls_at_once_are_one_turn(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "parallel_calls", session)
    assert said == {"answer": "7 3", "messages": ["human", "ai", "tool", "tool", "ai"]}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_streamed_agent_is_recorded_as_an_invoked_one(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "stream", session)
    assert said["answer"] == "7"
    assert said["call_chunks"] >= 1
    assert session.story() == CALLED_THEN_ANSWERED


def test_an_asynchronous_stream_of_steps_is_recorded_as_an_invoked_agent(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "stream_updates", session) == {"steps": ["model", "tools", "model"]}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_thread_with_memory_stays_one_branch(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "memory", session) == {"answers": ["7", "3"]}
    assert [relation for relation, _ in session.story()] == ["root", "extends", "extends", "extends"]


def test_the_older_react_agent_works_too(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "react_agent", session) == {"answer": "3", "messages": MESSAGES}
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_tool_can_be_demanded(stack: RunningStack) -> None:
    assert stack.play(CLIENT, "forced_tool", stack.session()) == {"called": ["get"], "usage": True}


def test_structured_output_is_parsed(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "structured", session)
    assert list(said["parsed"]) == ["digit"]
    assert session.story() == [("root", "stop")]


def test_errors_are_the_sdks_own(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "errors", session) == {
        "bad_value": ["OpenAIInvalidRequestError", "invalid_request_error", None],
        "bad_key": ["OpenAIAuthenticationError", "authentication_error", None],
        "no_such_version": ["OpenAIModelNotFoundError", "not_found_error", "model_not_found"],
    }
    assert session.story() == []
