"""SDKs retry when an answer is lost; the session records the retry, and nothing is trained twice."""

import pytest

from tests.support.clients.lossy import LossyProxy
from tests.support.clients.stack import RunningStack
from tests.support.serving import serving

LOOPS = {
    "openai_python": "tool_loop",
    "openai_npm": "tool_loop",
    "anthropic_python": "tool_loop",
    "openai_agents": "tool_loop",
    "langgraph": "invoke",
    "litellm": "tool_loop",
}


@pytest.mark.parametrize("client", LOOPS)
def test_a_lost_answer_is_asked_for_again_and_counts_once(stack: RunningStack, client: str) -> None:
    session = stack.session()
    proxy = LossyProxy(stack.url)
    with serving(proxy.app()) as url:
        assert stack.play(client, LOOPS[client], session, url=url)["answer"] == "7"
    assert proxy.retry_counts == ["0", "1", "0"]
    assert session.story() == [("root", "tool_calls"), ("retry", "tool_calls"), ("extends", "stop")]
    assert session.end(reward=1.0) == "ready"
    lost, again, answer = session.turns()
    assert lost["verdict"]["code"] == "orphan_retry"
    assert answer["parent_id"] == again["turn_id"]
