"""opencode: its own tools, a conversation that goes on, thoughts, titles, and the session that it names."""

from tests.support.agents.acting_engine import tool_call
from tests.support.agents.running import RunningAgents, kinds

AGENT = "opencode"
QUESTION, SECOND = "Save the word weir in word.txt.", "Say it in capitals."


def test_x(agents: RunningAgents) -> None:
    answers = {
        "Wrote file": tool_call("bash", command="cat word.txt && echo -read", description="Reads the file"),
        "weir-read": "The word is saved.",
        SECOND: "WEIR",
        QUESTION: tool_call("write", filePath=str(agents.work / "word.txt"), content="weir"),
    }
    said = agents.play(AGENT, "ask", answers=answers, QUESTION=QUESTION)
    print(said)
    print([(s.session_id, kinds(s)) for s in agents.sessions()])
    agents.play(AGENT, "go_on", answers=answers, QUESTION=SECOND)
    print([(s.session_id, kinds(s)) for s in agents.sessions()])
    assert 0
