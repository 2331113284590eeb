"""Traces of real services: from the agent's call to the push of the version that it taught."""

import pytest

from tests.support.gateway.running import ADMIN_KEY
from tests.support.observe.observed import AGENT_SPAN, AGENT_TRACE, COLLECTOR_KEY, SECRET_WORDS, Observed
from tests.support.rollout_server.weights import published_copy

pytestmark = pytest.mark.long

SERVER, CLIENT, PRODUCER = 2, 3, 4
"""Kinds of spans in OTLP."""
ROUTE = "POST /sessions/{session_id}/v1/chat/completions"
PUSH_TRACE = "5bf92f3577b34da6a3ce929d0e0e4736"


def test_a_call_is_traced_from_the_agent_to_the_engine_and_the_record(observed: Observed) -> None:
    calls = observed.receiver.wait_for(ROUTE, "gateway", 2)
    assert {(each.trace_id, each.parent_id, each.kind) for each in calls} == {
        (AGENT_TRACE, AGENT_SPAN, SERVER)
    }
    assert {each.attributes["http.response.status_code"] for each in calls} == {200}
    ids = {each.span_id for each in calls}
    engine = observed.receiver.wait_for("chat policy", "gateway", 2)
    records = observed.receiver.wait_for("rl.record", "gateway", 2)
    assert {each.parent_id for each in engine} == {each.parent_id for each in records} == ids
    assert {each.kind for each in engine} == {CLIENT}
    assert {each.kind for each in records} == {PRODUCER}
    assert {each.attributes["rl.turn.id"] for each in engine} == set(observed.turn_ids)
    said = engine[0].attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    assert said["gen_ai.usage.input_tokens"] > 0
    assert said["gen_ai.usage.output_tokens"] > 0


def test_the_engine_gets_the_context(observed: Observed) -> None:
    engine = {each.span_id for each in observed.receiver.wait_for("chat policy", "gateway", 2)}
    given = observed.gateway.engine.traceparents
    assert {each.split("-")[1] for each in given if each} == {AGENT_TRACE}
    assert {each.split("-")[2] for each in given if each} == engine


def test_a_step_links_to_the_turns_that_it_trained_and_its_version_is_published_under_it(
    observed: Observed,
) -> None:
    (step,) = observed.receiver.wait_for("rl.step", "trainer")
    records = observed.receiver.wait_for("rl.record", "gateway", 2)
    assert set(step.links) == {each.span_id for each in records}
    assert step.attributes["rl.step.turns"] == 2
    assert step.attributes["rl.step.made"] is True
    assert step.attributes["rl.reward_mean"] == 0.5
    (publish,) = observed.receiver.wait_for("rl.publish", "trainer")
    assert (publish.trace_id, publish.parent_id) == (step.trace_id, step.span_id)
    (announced,) = observed.receiver.wait_for("POST /admin/policies", "gateway")
    assert (announced.trace_id, announced.parent_id) == (publish.trace_id, publish.span_id)


def test_a_push_continues_in_the_rollout_server(observed: Observed) -> None:
    directory = observed.directory
    policy = published_copy(directory / "model", directory / "policies" / "v1", 1)
    parent = {"traceparent": f"00-{PUSH_TRACE}-{AGENT_SPAN}-01"}
    body = {"version": 1, "location": policy.as_uri()}
    reply = observed.pushing.post("/admin/policies", body, key=ADMIN_KEY, headers=parent, timeout=300)
    assert reply.status_code == 200, reply.text
    (announced,) = [
        each
        for each in observed.receiver.wait_for("POST /admin/policies", "gateway", 2)
        if each.trace_id == PUSH_TRACE
    ]
    asked = observed.receiver.wait_for("POST /reload", "gateway", 2)
    loaded = observed.receiver.wait_for("POST /reload", "server", 2)
    assert {each.parent_id for each in asked} == {announced.span_id}
    assert {each.parent_id for each in loaded} == {each.span_id for each in asked}
    assert {each.trace_id for each in loaded} == {PUSH_TRACE}
    assert {each.attributes["rl.prepare"] for each in loaded} == {True, False}


def test_no_text_and_no_key_is_sent_and_the_collector_gets_its_key(observed: Observed) -> None:
    observed.receiver.wait_for("chat policy", "gateway", 2)
    sent = str(observed.receiver.spans)
    assert SECRET_WORDS not in sent
    assert ADMIN_KEY not in sent
    assert set(observed.receiver.keys) == {COLLECTOR_KEY}


def test_a_call_without_a_context_is_not_traced_at_a_ratio_of_0(observed: Observed) -> None:
    before = len(observed.receiver.named("POST /v1/chat/completions"))
    assert observed.gateway.chat().status_code == 200
    headers = {"traceparent": f"00-{'6' * 32}-{'7' * 16}-01"}
    assert observed.gateway.chat(headers=headers).status_code == 200
    observed.receiver.wait_for("POST /v1/chat/completions", "gateway", before + 1)
    assert len(observed.receiver.named("POST /v1/chat/completions")) == before + 1
