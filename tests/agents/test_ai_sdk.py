"""Vercel's AI SDK on Chat (two providers), Responses and Messages: tool loops, streams, and objects."""

import pytest

from tests.support.agents.acting_engine import READING_PACE_S, tool_call
from tests.support.agents.running import RunningAgents, kinds

AGENT = "ai_sdk"
PROVIDERS = ["compatible", "chat", "responses", "anthropic"]
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


@pytest.mark.parametrize("scene", ["conversation", "streamed"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_conversation_with_tools_is_one_branch(agents: RunningAgents, provider: str, scene: str) -> None:
    session = agents.session()
    agents.engine.pace_s = READING_PACE_S
    said = agents.play(AGENT, scene, session, answers=ANSWERS, AGENT_PROVIDER=provider)
    assert said["answers"] == SAID
    assert said.get("pieces", 99) > len(SAID)
    assert (agents.work / "word.txt").read_text() == "weir"
    assert kinds(session) == ONE_BRANCH
    assert session.end(reward=1.0) == "ready"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_thoughts_come_back_as_they_were(agents: RunningAgents, provider: str) -> None:
    session = agents.session()
    said = agents.play(AGENT, "streamed", session, answers=THOUGHTS, AGENT_PROVIDER=provider)
    assert said["answers"] == SAID
    assert kinds(session) == THOUGHT_ANEW


@pytest.mark.parametrize("provider", ["compatible", "responses"])
def test_two_questions_without_a_session_are_found_by_their_history(
    agents: RunningAgents, provider: str
) -> None:
    agents.play(AGENT, "conversation", answers=ANSWERS, AGENT_PROVIDER=provider)
    (session,) = agents.sessions()
    assert kinds(session) == ONE_BRANCH
    assert session.view()["inferred"] is True


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_answer_is_an_object_of_a_schema(agents: RunningAgents, provider: str) -> None:
    session = agents.session()
    agents.engine.side_answer = '{"word": "weir", "letters": 4}'
    said = agents.play(AGENT, "object", session, answers={}, AGENT_PROVIDER=provider)
    assert said == {"object": {"word": "weir", "letters": 4}}
    assert kinds(session) == ["root"]
