"""Claude Code: its tools, a resumed conversation, a sub-agent, thoughts, and the session id that it sends."""

from tests.support.agents.acting_engine import tool_call
from tests.support.agents.running import RunningAgents, kinds

AGENT = "claude_code"
TOOLS = "Bash,Write,Read,Agent"
QUESTION, SECOND = "Save the word weir in word.txt.", "Say it in capitals."


def answers_of(agents: RunningAgents) -> dict[str, str]:
    return {
        "File created": tool_call("Bash", command="cat word.txt && echo -read", description="Reads the file"),
        "weir-read": "The word is saved.",
        SECOND: "WEIR",
        QUESTION: tool_call("Write", file_path=str(agents.work / "word.txt"), content="weir"),
    }


def thoughtful(answers: dict[str, str]) -> dict[str, str]:
    return {cue: f"<think>\nI know what to do.\n</think>\n\n{answer}" for cue, answer in answers.items()}


def test_a_conversation_with_tools_is_one_branch_of_the_agents_own_session(agents: RunningAgents) -> None:
    answers = answers_of(agents)
    said = agents.play(AGENT, "ask", answers=answers, QUESTION=QUESTION, TOOLS=TOOLS)
    assert said["result"] == "The word is saved."
    assert (agents.work / "word.txt").read_text() == "weir"
    again = agents.play(AGENT, "go_on", answers=answers, QUESTION=SECOND, TOOLS=TOOLS)
    assert again["result"] == "WEIR"

    (session,) = agents.sessions()
    assert session.session_id == said["session_id"] == again["session_id"]
    assert session.view()["inferred"] is False
    assert kinds(session) == ["root", "extends", "extends", "extends"]


def test_a_given_session_goes_before_the_agents_own(agents: RunningAgents) -> None:
    session = agents.session()
    said = agents.play(AGENT, "ask", session, answers=answers_of(agents), QUESTION=QUESTION, TOOLS=TOOLS)
    assert said["result"] == "The word is saved."
    assert kinds(session) == ["root", "extends", "extends"]
    assert session.end(reward=1.0) == "ready"


def test_thoughts_come_back_as_they_were(agents: RunningAgents) -> None:
    answers = thoughtful(answers_of(agents))
    said = agents.play(AGENT, "ask", answers=answers, QUESTION=QUESTION, TOOLS=TOOLS)
    assert said["result"] == "The word is saved."
    agents.play(AGENT, "go_on", answers=answers, QUESTION=SECOND, TOOLS=TOOLS)
    (session,) = agents.sessions()
    assert kinds(session) == ["root", "extends", "extends", "rerendered template_rewrites_history"]


def test_parallel_calls_are_one_turn(agents: RunningAgents) -> None:
    session = agents.session()
    calls = [tool_call("Bash", command=f"echo {word}-said", description="Says it") for word in ("a", "b")]
    answers = {"b-said": "Both said.", QUESTION: "\n".join(calls)}
    said = agents.play(AGENT, "ask", session, answers=answers, QUESTION=QUESTION, TOOLS=TOOLS)
    assert said["result"] == "Both said."
    assert kinds(session) == ["root", "extends"]


def test_a_sub_agent_is_a_branch_of_its_own(agents: RunningAgents) -> None:
    session = agents.session()
    task = {
        "description": "Says hello",
        "prompt": "Please say hello to me.",
        "subagent_type": "general-purpose",
    }
    answers = {
        "hello there": "It said hello.",
        "Please say hello to me.": "hello there",
        QUESTION: tool_call("Agent", **task, run_in_background=False),
    }
    said = agents.play(AGENT, "ask", session, answers=answers, QUESTION=QUESTION, TOOLS=TOOLS)
    assert said["result"] == "It said hello."
    assert kinds(session) == ["root", "forks sub_agent", "extends"]


def test_the_agents_events_count_the_recorded_turns_and_tokens(agents: RunningAgents) -> None:
    session = agents.session()
    said = agents.play(AGENT, "streamed", session, answers=answers_of(agents), QUESTION=QUESTION, TOOLS=TOOLS)
    turns = session.turns()
    assert said["num_turns"] == len(turns)
    assert said["usage"]["output_tokens"] == sum(turn["output_len"] for turn in turns)
