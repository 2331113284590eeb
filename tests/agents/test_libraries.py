"""Vercel's AI SDK and pydantic-ai on Chat, Responses and Messages: tool loops, streams, and typed answers."""

from typing import Any

import pytest

from tests.support.agents.acting_engine import READING_PACE_S, tool_call
from tests.support.agents.running import RunningAgents, kinds, thoughtful

AI_SDK = [("ai_sdk", {"AGENT_PROVIDER": each}) for each in ("compatible", "chat", "responses", "anthropic")]
MODELS = ("openai:gpt-5", "openai-chat:gpt-5", "anthropic:claude-sonnet-4-5")
"""pydantic-ai uses the Responses API for `openai:`."""
PYDANTIC = [("pydantic_ai", {"AGENT_MODEL": each}) for each in MODELS]
ANSWERS = {
    "wrote word.txt": "It is saved.",
    "word.txt has weir": "The word is weir.",
    "Read it back": tool_call("read", path="word.txt"),
    "Save the word": tool_call("write", path="word.txt", text="weir"),
}
SAID = ["It is saved.", "The word is weir."]
ONE_BRANCH = ["root", "extends", "extends", "extends"]
THOUGHT_ANEW = ["root", "extends", "rerendered template_rewrites_history", "extends"]
"""The second question rerenders the history, because Qwen3's template drops the thoughts before it."""


@pytest.mark.parametrize("scene", ["conversation", "streamed"])
@pytest.mark.parametrize(("agent", "asked"), AI_SDK + PYDANTIC)
def test_a_conversation_with_tools_is_one_branch(
    agents: RunningAgents, agent: str, asked: dict[str, Any], scene: str
) -> None:
    session = agents.session()
    agents.engine.pace_s = READING_PACE_S
    said = agents.play(agent, scene, session, answers=ANSWERS, **asked)
    assert said["answers"] == SAID
    assert scene == "conversation" or said["pieces"] > len(SAID)
    assert (agents.work / "word.txt").read_text() == "weir"
    assert kinds(session) == ONE_BRANCH
    assert session.end(reward=1.0) == "ready"


@pytest.mark.parametrize(
    ("agent", "asked", "scene"),
    [
        *((*each, "streamed") for each in AI_SDK + PYDANTIC),
        *((*each, scene) for each in PYDANTIC for scene in ("conversation", "kept_history")),
    ],
)
def test_thoughts_come_back_as_they_were(
    agents: RunningAgents, agent: str, asked: dict[str, Any], scene: str
) -> None:
    session = agents.session()
    said = agents.play(agent, scene, session, answers=thoughtful(ANSWERS), **asked)
    assert said["answers"] == SAID
    assert kinds(session) == THOUGHT_ANEW


@pytest.mark.parametrize(("agent", "asked"), [AI_SDK[0], AI_SDK[2], *PYDANTIC])
def test_two_questions_without_a_session_are_found_by_their_history(
    agents: RunningAgents, agent: str, asked: dict[str, Any]
) -> None:
    agents.play(agent, "conversation", answers=ANSWERS, **asked)
    (session,) = agents.sessions()
    assert kinds(session) == ONE_BRANCH
    assert session.view()["inferred"] is True


@pytest.mark.parametrize(("agent", "asked"), AI_SDK)
def test_an_answer_is_an_object_of_a_schema(agents: RunningAgents, agent: str, asked: dict[str, Any]) -> None:
    session = agents.session()
    agents.engine.side_answer = '{"word": "weir", "letters": 4}'
    said = agents.play(agent, "object", session, answers={}, **asked)
    assert said == {"object": {"word": "weir", "letters": 4}}
    assert kinds(session) == ["root"]


@pytest.mark.parametrize(("agent", "asked"), PYDANTIC)
def test_a_typed_answer_is_parsed_from_a_tool_call(
    agents: RunningAgents, agent: str, asked: dict[str, Any]
) -> None:
    session = agents.session()
    typed = ANSWERS | {"wrote word.txt": tool_call("final_result", word="weir", letters=4)}
    said = agents.play(agent, "typed", session, answers=typed, **asked)
    assert said == {"parsed": {"word": "weir", "letters": 4}}
    assert kinds(session) == ["root", "extends"]
