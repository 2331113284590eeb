"""`smolagents` requires a tool call in every turn, and rewrites its history as text."""

import pytest

from tests.support.clients.stack import RunningStack

CLIENT = "smolagents"


@pytest.mark.parametrize("scene", ["run", "streamed"])
def test_a_run_ends_with_its_final_answer_and_a_rewritten_history_is_a_new_branch(
    stack: RunningStack, scene: str
) -> None:
    session = stack.session()
    # The small model understands its rewritten history badly, so the test does not check its answer.
    assert stack.play(CLIENT, scene, session)["calls"] == ["get", "final_answer"]
    assert session.story() == [("root", "tool_calls"), ("forks", "tool_calls")]
    assert session.turns()[1]["reason"] == "history_edited"
    assert session.end(reward=1.0) == "ready"
