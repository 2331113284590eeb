"""Claude Code, Codex and opencode: tools, resumed conversations, thoughts, and session ids of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.acting_engine import tool_call
from tests.support.agents.running import RunningAgents, kinds, thoughtful
from tests.support.clients.stack import Session

QUESTION, SECOND = "Save the word weir in word.txt.", "Say it in capitals."
SAVED, CAPITALS = "The word is saved.", "WEIR"
TITLE = "Words and files"
TOOLS = "Bash,Write,Read,Agent"
READ = {"command": "cat word.txt && echo -read", "description": "Reads the file"}


def claude_answers(work: Path) -> dict[str, str]:
    return {
        "File created": tool_call("Bash", **READ),
        "weir-read": SAVED,
        SECOND: CAPITALS,
        QUESTION: tool_call("Write", file_path=str(work / "word.txt"), content="weir"),
    }


def codex_answers(work: Path) -> dict[str, str]:
    command = "printf weir > word.txt && cat word.txt && echo -read"
    return {"weir-read": SAVED, SECOND: CAPITALS, QUESTION: tool_call("exec_command", cmd=command)}


def opencode_answers(work: Path) -> dict[str, str]:
    return {
        "Wrote file": tool_call("bash", **READ),
        "weir-read": SAVED,
        SECOND: CAPITALS,
        QUESTION: tool_call("write", filePath=str(work / "word.txt"), content="weir"),
    }


def without_title(session: Session) -> list[str]:
    """How each turn continues the conversation, without the call by which opencode asks for a title."""
    turns: list[dict[str, Any]] = session.turns()
    (title,) = [turn for turn in turns if TITLE in turn["output_text"]]
    first, *more = [
        (turn, kind) for turn, kind in zip(turns, kinds(session), strict=True) if turn is not title
    ]
    assert title["parent_id"] is first[0]["parent_id"] is None
    return ["root", *(kind for _, kind in more)]


@dataclass(frozen=True)
class Harness:
    """What is particular to an agent."""

    answers: Callable[[Path], dict[str, str]]
    text: Callable[[Any], str]
    """The last text in what it prints."""
    session_id: Callable[[Any, Path], str]
    """A text that contains the id that it made for its session."""
    calls: int
    """How many tool calls the first question needs."""
    line: Callable[[Session], list[str]] = kinds


HARNESSES = {
    "claude_code": Harness(
        claude_answers, lambda said: said["result"], lambda said, _: said["session_id"], calls=2
    ),
    "codex": Harness(
        codex_answers,
        lambda said: said["item"]["text"],
        lambda _, work: (work / "events.jsonl").read_text(),
        calls=1,
    ),
    "opencode": Harness(
        opencode_answers,
        lambda said: said["part"]["text"],
        lambda said, _: said["sessionID"],
        calls=2,
        line=without_title,
    ),
}


@pytest.mark.parametrize("agent", HARNESSES)
def test_a_conversation_with_tools_is_one_branch_of_the_agents_own_session(
    agents: RunningAgents, agent: str
) -> None:
    its = HARNESSES[agent]
    answers = its.answers(agents.work)
    said = agents.play(agent, "ask", answers=answers, QUESTION=QUESTION, TOOLS=TOOLS)
    assert its.text(said) == SAVED
    assert (agents.work / "word.txt").read_text() == "weir"
    again = agents.play(agent, "go_on", answers=answers, QUESTION=SECOND, TOOLS=TOOLS)
    assert its.text(again) == CAPITALS
    (session,) = agents.sessions()
    assert all(session.session_id in its.session_id(each, agents.work) for each in (said, again))
    assert session.view()["inferred"] is False
    assert its.line(session) == ["root", *["extends"] * (its.calls + 1)]


@pytest.mark.parametrize("agent", HARNESSES)
def test_a_given_session_goes_before_the_agents_own(agents: RunningAgents, agent: str) -> None:
    its, session = HARNESSES[agent], agents.session()
    answers = its.answers(agents.work)
    said = agents.play(agent, "ask", session, answers=answers, QUESTION=QUESTION, TOOLS=TOOLS)
    assert its.text(said) == SAVED
    assert its.line(session) == ["root", *["extends"] * its.calls]
    assert session.end(reward=1.0) == "ready"


@pytest.mark.parametrize("agent", HARNESSES)
def test_thoughts_come_back_as_they_were(agents: RunningAgents, agent: str) -> None:
    its = HARNESSES[agent]
    answers = thoughtful(its.answers(agents.work))
    said = agents.play(agent, "ask", answers=answers, QUESTION=QUESTION, TOOLS=TOOLS)
    assert its.text(said).endswith(SAVED)
    agents.play(agent, "go_on", answers=answers, QUESTION=SECOND, TOOLS=TOOLS)
    (session,) = agents.sessions()
    again = "rerendered template_rewrites_history"
    assert its.line(session) == ["root", *["extends"] * its.calls, again]


def asked_claude(agents: RunningAgents, scene: str, session: Session, answers: dict[str, str]) -> Any:
    return agents.play("claude_code", scene, session, answers=answers, QUESTION=QUESTION, TOOLS=TOOLS)


def test_parallel_calls_are_one_turn(agents: RunningAgents) -> None:
    session = agents.session()
    calls = [tool_call("Bash", command=f"echo {word}-said", description="Says it") for word in ("a", "b")]
    answers = {"b-said": "Both said.", QUESTION: "\n".join(calls)}
    assert asked_claude(agents, "ask", session, answers)["result"] == "Both said."
    assert kinds(session) == ["root", "extends"]


def test_a_sub_agent_is_a_branch_of_its_own(agents: RunningAgents) -> None:
    session, prompt = agents.session(), "Please say hello to me."
    task = {"description": "Says hello", "prompt": prompt, "subagent_type": "general-purpose"}
    answers = {
        "hello there": "It said hello.",
        prompt: "hello there",
        QUESTION: tool_call("Agent", **task, run_in_background=False),
    }
    assert asked_claude(agents, "ask", session, answers)["result"] == "It said hello."
    assert kinds(session) == ["root", "forks sub_agent", "extends"]


def test_the_agents_events_count_the_recorded_turns_and_tokens(agents: RunningAgents) -> None:
    session = agents.session()
    said = asked_claude(agents, "streamed", session, claude_answers(agents.work))
    turns = session.turns()
    assert said["num_turns"] == len(turns)
    assert said["usage"]["output_tokens"] == sum(turn["output_len"] for turn in turns)
