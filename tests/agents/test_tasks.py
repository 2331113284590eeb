"""inspect-ai and mini-swe-agent solve one task: with a tool or with bash, on Chat, Responses and Messages."""

import pytest

from tests.support.agents.acting_engine import tool_call
from tests.support.agents.running import RunningAgents, kinds, thoughtful

PROBE = ["root", "forks main_line", "extends"]
"""The first turn is a probe: inspect-ai asks whether one of OpenAI's reasoning models shows summaries."""
QUESTION = "Save the word weir in word.txt."
IN_SHELL = "printf weir > word.txt && cat word.txt && echo -read"
EVALUATED = {
    "wrote word.txt": "I submit it.\n" + tool_call("submit", answer="weir"),
    "Save the word weir": tool_call("write", path="word.txt", text="weir"),
}
SOLVED = {
    '"output": "weir-read': "It is there.\n"
    + tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat word.txt"),
    QUESTION: "I write the file first.\n" + tool_call("bash", command=IN_SHELL),
}
SUBMITTED = ("Submitted", "weir")


@pytest.mark.parametrize(
    ("model", "answers", "story"),
    [
        ("openai/gpt-4o", EVALUATED, ["root", "extends"]),
        ("openai/gpt-5", thoughtful(EVALUATED), PROBE),
        ("openai-api/weir/policy", thoughtful(EVALUATED), ["root", "extends"]),
        ("anthropic/claude-sonnet-4-5", thoughtful(EVALUATED), ["root", "extends"]),
    ],
    ids=["chat", "responses", "compatible", "messages"],
)
def test_an_evaluation_of_inspect_ai_is_one_branch(
    agents: RunningAgents, model: str, answers: dict[str, str], story: list[str]
) -> None:
    session = agents.session()
    where = {"WEIR_BASE_URL": session.ticket["base_url"], "WEIR_API_KEY": session.ticket["api_key"]}
    said = agents.play("inspect_ai", "solved", session, answers=answers, AGENT_MODEL=model, **where)
    assert (said["status"], said["score"]) == ("success", "C")
    assert (agents.work / "word.txt").read_text() == "weir"
    assert kinds(session) == story
    assert session.end(reward=1.0) == "ready"


def test_bash_runs_the_command_that_the_model_wrote(agents: RunningAgents) -> None:
    session = agents.session()
    answers = {
        "weir-read": tool_call("submit", answer="weir"),
        "Save the word weir": tool_call("bash", command=IN_SHELL),
    }
    said = agents.play("inspect_ai", "in_a_sandbox", session, answers=answers, AGENT_MODEL="openai/gpt-4o")
    assert (said["status"], said["score"]) == ("success", "C")
    assert kinds(session) == ["root", "extends"]


def solved(agents: RunningAgents, answers: dict[str, str], session: bool = True) -> list[str]:
    """How the turns of mini-swe-agent continue each other. It has submitted its file."""
    given = agents.session() if session else None
    said = agents.play("mini_swe_agent", "solve", given, answers=answers, QUESTION=QUESTION)
    assert (said["exit_status"], said["submission"]) == SUBMITTED
    assert (agents.work / "word.txt").read_text() == "weir"
    (found,) = agents.sessions()
    assert found.view()["inferred"] == (not session)
    if given is not None:
        assert given.end(reward=1.0) == "ready"
    return kinds(found)


def test_a_task_of_mini_swe_agent_is_one_branch(agents: RunningAgents) -> None:
    assert solved(agents, SOLVED) == ["root", "extends"]


def test_a_task_with_thoughts_is_one_branch(agents: RunningAgents) -> None:
    assert solved(agents, thoughtful(SOLVED)) == ["root", "extends"]


def test_a_task_without_a_session_is_found_by_its_history(agents: RunningAgents) -> None:
    assert solved(agents, SOLVED, session=False) == ["root", "extends"]


def test_an_answer_that_the_agent_drops_ends_its_branch(agents: RunningAgents) -> None:
    """If an answer has no tool call, the agent's history gets an error message in place of the answer."""
    answers = {"Tool call error": SOLVED[QUESTION]} | SOLVED | {QUESTION: "I only talk."}
    assert solved(agents, answers) == ["root", "forks history_edited", "extends"]
