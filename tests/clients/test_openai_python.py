"""`openai` for Python: the chat, completions and responses APIs, plain and streamed."""

import json
import re

from tests.support.clients.stack import RunningStack, Session

CLIENT = "openai_python"
CALLED_THEN_ANSWERED = [("root", "tool_calls"), ("extends", "stop")]


def test_a_tool_loop_is_one_branch_of_exact_tokens(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "tool_loop", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED
    first, second = session.turns()
    assert second["parent_id"] == first["turn_id"]
    assert second["context_text"].startswith("\n<|im_start|>user\n<tool_response>\nc = 7")
    assert session.end(reward=1.0) == "ready"


def test_two_calls_at_once_are_one_turn(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "parallel_calls", session)
    assert said["answer"] == "7 3"
    assert [json.loads(arguments) for arguments in said["calls"]] == [{"key": "c"}, {"key": "d"}]
    assert session.story() == CALLED_THEN_ANSWERED


def test_a_long_conversation_stays_one_branch(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "conversation", session) == {"answers": ["7", "3", "7"]}
    assert session.story() == [
        ("root", "tool_calls"),
        ("extends", "stop"),
        *[("extends", "tool_calls"), ("extends", "stop")] * 2,
    ]


def test_a_streamed_tool_loop_is_recorded_as_a_plain_one(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "stream", session)
    assert (said["answer"], said["finish"]) == ("7", "tool_calls")
    assert session.story() == CALLED_THEN_ANSWERED
    assert said["completion_tokens"] == session.turns()[0]["output_len"]


def test_the_streaming_helper_sees_whole_calls(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "stream_helper", session)
    assert said["answer"] == "7 3"
    assert {"chunk", "tool_calls.function.arguments.delta", "content.done"} <= set(said["events"])
    assert session.story() == CALLED_THEN_ANSWERED


def test_agents_that_share_a_key_and_name_no_session_each_get_their_own(stack: RunningStack) -> None:
    before = {session.session_id for session in stack.sessions()}
    assert stack.play(CLIENT, "many_at_once") == {"answers": list("18734950")}
    new = [session for session in stack.sessions() if session.session_id not in before]
    assert sum(len(session.turns()) for session in new) == 16
    assert all(session.view()["inferred"] for session in new)
    assert [session.story() for session in new] == [CALLED_THEN_ANSWERED] * 8
    told = {
        asked_for(session): session.turns()[-1]["output_text"].removesuffix("<|im_end|>") for session in new
    }
    assert told == dict(zip("abcdefgh", "18734950", strict=True))


def asked_for(session: Session) -> str:
    (key,) = re.findall(r"value of (\w)\?", session.turns()[0]["context_text"])
    return str(key)


def test_three_samples_are_three_turns(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "samples", session)
    assert said["finishes"] == ["tool_calls"] * 3
    turns = session.turns()
    assert said["logprobs"] == [turn["output_len"] for turn in turns]
    assert said["completion_tokens"] == sum(turn["output_len"] for turn in turns)


def test_a_tool_can_be_demanded(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "forced_tool", session) == {"called": ["get", "get"]}
    assert [relation for relation, _ in session.story()] == ["root", "forks"]


def test_an_answer_can_be_parsed(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "parsed", session)
    assert set(said["parsed"]) == {"digit", "even"}
    assert session.story() == [("root", "stop")]


def test_the_older_completions_are_recorded_too(stack: RunningStack) -> None:
    session = stack.session()
    said = stack.play(CLIENT, "completions", session)
    turns = session.turns()
    assert said["completion_tokens"] == turns[0]["output_len"]
    assert [said["finish"], said["streamed_finish"]] == [turn["finish_reason"] for turn in turns]


def test_responses_continue_by_id(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "responses", session) == {"answer": "7"}
    assert session.story() == CALLED_THEN_ANSWERED


def test_the_models_are_listed(stack: RunningStack) -> None:
    assert "policy" in stack.play(CLIENT, "models")["models"]


def test_errors_are_the_sdks_own(stack: RunningStack) -> None:
    session = stack.session()
    assert stack.play(CLIENT, "errors", session) == {
        "bad_value": ["BadRequestError", "invalid_request_error", None, True],
        "no_messages": ["BadRequestError", "invalid_request_error", None, True],
        "too_long": ["BadRequestError", "invalid_request_error", "context_length_exceeded", True],
        "image": ["BadRequestError", "invalid_request_error", None, True],
        "bad_key": ["AuthenticationError", "authentication_error", None, True],
        "no_such_version": ["NotFoundError", "not_found_error", "model_not_found", True],
    }
    assert session.story() == []


def test_a_finished_session_takes_no_call(stack: RunningStack) -> None:
    session = stack.session()
    assert session.end(reward=1.0) == "ready"
    said = stack.play(CLIENT, "finished", session)
    assert said == {"error": ["ConflictError", "conflict_error", "session_finished", True]}
