"""inspect-ai: evaluations of its ReAct agent on Chat, Responses and Messages, with a tool and with bash."""

import pytest

from tests.support.agents.acting_engine import tool_call
from tests.support.agents.running import RunningAgents, kinds

AGENT = "inspect_ai"
PROBE = ["root", "forks main_line", "extends"]
"""The first turn is a probe: inspect-ai asks whether one of OpenAI's reasoning models shows summaries."""
QUESTION = "Save the word weir"
ANSWERS = {
    "wrote word.txt": "I submit it.\n" + tool_call("submit", answer="weir"),
    QUESTION: tool_call("write", path="word.txt", text="weir"),
}
THOUGHTS = {cue: f"<think>\nI know what to do.\n</think>\n\n{answer}" for cue, answer in ANSWERS.items()}


@pytest.mark.parametrize(
    ("model", "answers", "story"),
    [
        ("openai/gpt-4o", ANSWERS, ["root", "extends"]),
        ("openai/gpt-5", THOUGHTS, PROBE),
        ("openai-api/weir/policy", THOUGHTS, ["root", "extends"]),
        ("anthropic/claude-sonnet-4-5", THOUGHTS, ["root", "extends"]),
    ],
    ids=["chat", "responses", "compatible", "messages"],
)
def test_an_evaluation_is_one_branch(
    agents: RunningAgents, model: str, answers: dict[str, str], story: list[str]
) -> None:
    session = agents.session()
    said = agents.play(
        AGENT,
        "solved",
        session,
        answers=answers,
        AGENT_MODEL=model,
        WEIR_BASE_URL=session.ticket["base_url"],
        WEIR_API_KEY=session.ticket["api_key"],
    )
    assert (said["status"], said["score"]) == ("success", "C")
    assert (agents.work / "word.txt").read_text() == "weir"
    assert kinds(session) == story
    assert session.end(reward=1.0) == "ready"


def test_bash_runs_the_command_that_the_model_wrote(agents: RunningAgents) -> None:
    session = agents.session()
    answers = {
        "weir-read": tool_call("submit", answer="weir"),
        QUESTION: tool_call("bash", command="printf weir > word.txt && cat word.txt && echo -read"),
    }
    said = agents.play(AGENT, "in_a_sandbox", session, answers=answers, AGENT_MODEL="openai/gpt-4o")
    assert (said["status"], said["score"]) == ("success", "C")
    assert kinds(session) == ["root", "extends"]
