"""`pydantic-ai` on Chat, Responses and Messages: tool loops, plain and streamed."""

import pytest

from tests.support.agents.acting_engine import READING_PACE_S, tool_call
from tests.support.agents.running import RunningAgents, kinds

AGENT = "pydantic_ai"
MODELS = ["openai:gpt-5", "openai-chat:gpt-5", "anthropic:claude-sonnet-4-5"]
"""pydantic-ai uses the Responses API for `openai:`."""
ANSWERS = {
    "wrote word.txt": "It is saved.",
    "word.txt has weir": "The word is weir.",
    "Read it back": tool_call("read", path="word.txt"),
    "Save the word": tool_call("write", path="word.txt", text="weir"),
}
THOUGHTS = {cue: f"<think>\nI know what to do.\n</think>\n\n{answer}" for cue, answer in ANSWERS.items()}
SAID = ["It is saved.", "The word is weir."]
ONE_BRANCH = ["root", "extends", "extends", "extends"]
THOUGHT_ANEW = ["root", "extends", "rerendered template_rewrites_history", "extends"]
"""The second question rerenders the history, because Qwen3's template drops the thoughts before it."""


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_with_tools_is_one_branch(agents: RunningAgents, model: str) -> None:
    session = agents.session()
    said = agents.play(AGENT, "conversation", session, answers=ANSWERS, AGENT_MODEL=model)
    assert said == {"answers": SAID}
    assert (agents.work / "word.txt").read_text() == "weir"
    assert kinds(session) == ONE_BRANCH
    assert session.end(reward=1.0) == "ready"


@pytest.mark.parametrize("model", MODELS)
def test_a_streamed_conversation_is_one_branch(agents: RunningAgents, model: str) -> None:
    session = agents.session()
    agents.engine.pace_s = READING_PACE_S
    said = agents.play(AGENT, "streamed", session, answers=ANSWERS, AGENT_MODEL=model)
    assert said["answers"] == SAID
    assert said["pieces"] > len(SAID)
    assert kinds(session) == ONE_BRANCH


@pytest.mark.parametrize("scene", ["conversation", "streamed", "kept_history"])
@pytest.mark.parametrize("model", MODELS)
def test_thoughts_come_back_as_they_were(agents: RunningAgents, model: str, scene: str) -> None:
    session = agents.session()
    said = agents.play(AGENT, scene, session, answers=THOUGHTS, AGENT_MODEL=model)
    assert said["answers"] == SAID
    assert kinds(session) == THOUGHT_ANEW


@pytest.mark.parametrize("model", MODELS)
def test_two_questions_without_a_session_are_found_by_their_history(
    agents: RunningAgents, model: str
) -> None:
    agents.play(AGENT, "conversation", answers=ANSWERS, AGENT_MODEL=model)
    (session,) = agents.sessions()
    assert kinds(session) == ONE_BRANCH
    assert session.view()["inferred"] is True


@pytest.mark.parametrize("model", MODELS)
def test_a_typed_answer_is_parsed_from_a_tool_call(agents: RunningAgents, model: str) -> None:
    session = agents.session()
    answers = {
        "wrote word.txt": tool_call("final_result", word="weir", letters=4),
        "Save the word": tool_call("write", path="word.txt", text="weir"),
    }
    said = agents.play(AGENT, "typed", session, answers=answers, AGENT_MODEL=model)
    assert said == {"parsed": {"word": "weir", "letters": 4}}
    assert kinds(session) == ["root", "extends"]
