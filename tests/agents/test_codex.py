"""Codex: its shell, a resumed conversation, thoughts, and the session id that it sends."""

from tests.support.agents.acting_engine import tool_call
from tests.support.agents.running import RunningAgents, kinds

AGENT = "codex"
QUESTION, SECOND = "Save the word weir in word.txt.", "Say it in capitals."
ANSWERS = {
    "weir-read": "The word is saved.",
    SECOND: "WEIR",
    QUESTION: tool_call("exec_command", cmd="printf weir > word.txt && cat word.txt && echo -read"),
}
THOUGHTS = {cue: f"<think>\nI know what to do.\n</think>\n\n{answer}" for cue, answer in ANSWERS.items()}


def test_a_conversation_with_tools_is_one_branch_of_the_agents_own_session(agents: RunningAgents) -> None:
    said = agents.play(AGENT, "ask", answers=ANSWERS, QUESTION=QUESTION)
    assert said["item"]["text"] == "The word is saved."
    assert (agents.work / "word.txt").read_text() == "weir"
    again = agents.play(AGENT, "go_on", answers=ANSWERS, QUESTION=SECOND)
    assert again["item"]["text"] == "WEIR"
    (session,) = agents.sessions()
    assert session.session_id in (agents.work / "events.jsonl").read_text()
    assert session.view()["inferred"] is False
    assert kinds(session) == ["root", "extends", "extends"]


def test_a_given_session_goes_before_the_agents_own(agents: RunningAgents) -> None:
    session = agents.session()
    said = agents.play(AGENT, "ask", session, answers=ANSWERS, QUESTION=QUESTION)
    assert said["item"]["text"] == "The word is saved."
    assert kinds(session) == ["root", "extends"]
    assert session.end(reward=1.0) == "ready"


def test_thoughts_come_back_as_they_were(agents: RunningAgents) -> None:
    agents.play(AGENT, "ask", answers=THOUGHTS, QUESTION=QUESTION)
    agents.play(AGENT, "go_on", answers=THOUGHTS, QUESTION=SECOND)
    (session,) = agents.sessions()
    assert kinds(session) == ["root", "extends", "rerendered template_rewrites_history"]
