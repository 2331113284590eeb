"""mini-swe-agent: it calls the chat API through litellm, and has one tool, bash."""

from tests.support.agents.acting_engine import tool_call
from tests.support.agents.running import RunningAgents, kinds

AGENT = "mini_swe_agent"
QUESTION = "Save the word weir in word.txt."
ANSWERS = {
    '"output": "weir-read': "It is there.\n"
    + tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat word.txt"),
    QUESTION: "I write the file first.\n"
    + tool_call("bash", command="printf weir > word.txt && cat word.txt && echo -read"),
}
THOUGHTS = {cue: f"<think>\nI know what to do.\n</think>\n\n{answer}" for cue, answer in ANSWERS.items()}
SUBMITTED = ("Submitted", "weir")


def ending(said: dict[str, str]) -> tuple[str, str]:
    return said["exit_status"], said["submission"]


def test_a_task_is_one_branch(agents: RunningAgents) -> None:
    session = agents.session()
    said = agents.play(AGENT, "solve", session, answers=ANSWERS, QUESTION=QUESTION)
    assert ending(said) == SUBMITTED
    assert (agents.work / "word.txt").read_text() == "weir"
    assert kinds(session) == ["root", "extends"]
    assert session.end(reward=1.0) == "ready"


def test_a_task_with_thoughts_is_one_branch(agents: RunningAgents) -> None:
    session = agents.session()
    said = agents.play(AGENT, "solve", session, answers=THOUGHTS, QUESTION=QUESTION)
    assert ending(said) == SUBMITTED
    assert kinds(session) == ["root", "extends"]


def test_a_task_without_a_session_is_found_by_its_history(agents: RunningAgents) -> None:
    agents.play(AGENT, "solve", answers=ANSWERS, QUESTION=QUESTION)
    (session,) = agents.sessions()
    assert kinds(session) == ["root", "extends"]
    assert session.view()["inferred"] is True


def test_an_answer_that_the_agent_drops_ends_its_branch(agents: RunningAgents) -> None:
    """If an answer has no tool call, the agent's history gets an error message in place of the answer."""
    session = agents.session()
    answers = {"Tool call error": ANSWERS[QUESTION]} | ANSWERS | {QUESTION: "I only talk."}
    said = agents.play(AGENT, "solve", session, answers=answers, QUESTION=QUESTION)
    assert ending(said) == SUBMITTED
    assert kinds(session) == ["root", "forks history_edited", "extends"]
