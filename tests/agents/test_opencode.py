"""opencode: its tools, a resumed conversation, thoughts, titles, and the session id that it sends."""

from typing import Any

from tests.support.agents.acting_engine import tool_call
from tests.support.agents.running import RunningAgents, kinds
from tests.support.clients.stack import Session

AGENT = "opencode"
QUESTION, SECOND = "Save the word weir in word.txt.", "Say it in capitals."
TITLE = "Words and files"


def answers_of(agents: RunningAgents, thought: str = "") -> dict[str, str]:
    answers = {
        "Wrote file": tool_call("bash", command="cat word.txt && echo -read", description="Reads the file"),
        "weir-read": "The word is saved.",
        SECOND: "WEIR",
        QUESTION: tool_call("write", filePath=str(agents.work / "word.txt"), content="weir"),
    }
    return {cue: thought + answer for cue, answer in answers.items()}


def main_line(session: Session) -> list[str]:
    """How each turn continues the conversation, without the call by which opencode asks for a title."""
    turns: list[dict[str, Any]] = session.turns()
    (title,) = [turn for turn in turns if TITLE in turn["output_text"]]
    first, *more = [
        (turn, kind) for turn, kind in zip(turns, kinds(session), strict=True) if turn is not title
    ]
    assert title["parent_id"] is first[0]["parent_id"] is None
    return ["begins", *(kind for _, kind in more)]


def test_a_conversation_with_tools_is_one_branch_of_the_agents_own_session(agents: RunningAgents) -> None:
    answers = answers_of(agents)
    said = agents.play(AGENT, "ask", answers=answers, QUESTION=QUESTION)
    assert said["part"]["text"] == "The word is saved."
    assert (agents.work / "word.txt").read_text() == "weir"
    again = agents.play(AGENT, "go_on", answers=answers, QUESTION=SECOND)
    assert again["part"]["text"] == "WEIR"
    (session,) = agents.sessions()
    assert session.session_id == said["sessionID"] == again["sessionID"]
    assert session.view()["inferred"] is False
    assert main_line(session) == ["begins", "extends", "extends", "extends"]


def test_a_given_session_goes_before_the_agents_own(agents: RunningAgents) -> None:
    session = agents.session()
    said = agents.play(AGENT, "ask", session, answers=answers_of(agents), QUESTION=QUESTION)
    assert said["part"]["text"] == "The word is saved."
    assert main_line(session) == ["begins", "extends", "extends"]
    assert session.end(reward=1.0) == "ready"


def test_thoughts_come_back_as_they_were(agents: RunningAgents) -> None:
    answers = answers_of(agents, thought="<think>\nI know what to do.\n</think>\n\n")
    agents.play(AGENT, "ask", answers=answers, QUESTION=QUESTION)
    agents.play(AGENT, "go_on", answers=answers, QUESTION=SECOND)
    (session,) = agents.sessions()
    assert main_line(session) == ["begins", "extends", "extends", "rerendered template_rewrites_history"]
