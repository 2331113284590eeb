"""A session, or the deployment, chooses how much the model thinks, and which thoughts prompts keep."""

from pathlib import Path
from typing import Any

import pytest

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.support.gateway.families_models import make_model
from tests.support.gateway.running import Backends, RunningGateway

CLOSED_THOUGHT = "</think>\n\n"
"""The end of a prompt with which this template turns thinking off."""
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI},
    "responses": {"input": "hi"},
    "messages": {"messages": HI, "max_tokens": 2049},
}
ON: dict[str, dict[str, Any]] = {
    "chat/completions": {"reasoning_effort": "low"},
    "responses": {"reasoning": {"effort": "low"}},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 2048}},
}
CONSTRAINED: dict[str, dict[str, Any]] = {
    "chat/completions": {"response_format": {"type": "json_object"}},
    "responses": {"text": {"format": {"type": "json_object"}}},
}


def thinks(gateway: RunningGateway, session: dict[str, Any], path: str, body: dict[str, Any]) -> bool:
    """Make a call of the session; return whether its prompt lets the model think."""
    reply = gateway.post(f"/sessions/{session['session_id']}/v1/{path}", body)
    assert reply.status_code == 200, reply.text
    prompt = gateway.engine.requests[-1]["input_ids"]
    return not gateway.engine.tokenizer.decode(prompt, skip_special_tokens=False).endswith(CLOSED_THOUGHT)


CALLS: list[tuple[str, dict[str, Any], bool]] = [
    ("chat/completions", {"reasoning_effort": "none"}, False),
    ("chat/completions", {"reasoning_effort": "low"}, True),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, False),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": True}}, True),
    ("responses", {"reasoning": {"effort": "none"}}, False),
    ("responses", {"reasoning": {"effort": "xhigh", "summary": "auto"}}, True),
    ("messages", {"thinking": {"type": "disabled"}}, False),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, True),
    ("messages", {"output_config": {"effort": "high"}}, True),
    ("messages", {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, True),
    ("messages", {"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, False),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_turns_thinking_on_or_off_in_its_dialects_words(gateway: RunningGateway, stream: bool) -> None:
    for path, fields, on in CALLS:
        session = gateway.session()
        assert thinks(gateway, session, path, BODIES[path] | fields | {"stream": stream}) is on, fields
        (turn,) = gateway.turns(session)
        assert turn["sampling"]["used"]["thinking"] == {"enable_thinking": on}, fields
        assert turn["sampling"]["asked"]["thinking"] == ("on" if on else "off"), fields
        assert "thinking" not in gateway.engine.requests[-1]["sampling_params"], fields


def effort(level: str, **more: Any) -> dict[str, Any]:
    return {"role": "system", "output_config": {"effort": level}, **more}


def test_the_effort_of_messages_is_recorded_whichever_it_is_and_wherever_it_stands(
    gateway: RunningGateway,
) -> None:
    session, body = gateway.session(reasoning_effort="none"), BODIES["messages"]
    for level in ("low", "medium", "high", "xhigh", "max"):
        for given in (
            {"output_config": {"effort": level}},
            {"messages": [*HI, effort(level)]},
            {"messages": [*HI, effort("low"), *HI, effort(level, content=""), *HI]},
            {"messages": [*HI, effort(level), *HI], "output_config": {"effort": "low"}},
        ):
            assert thinks(gateway, session, "messages", body | given), given
            asked = gateway.turns(session)[-1]["sampling"]["asked"]
            assert (asked["reasoning_effort"], asked["thinking"]) == (level, "on"), given
    said = effort("low", content="be brief")
    assert thinks(gateway, session, "messages", body | {"messages": [*HI, said]})
    prompt = gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])
    assert "be brief" in prompt
    counted = ({"messages": HI, "output_config": {"effort": "high"}}, {"messages": [*HI, effort("high")]})
    one, two = (gateway.post("/v1/messages/count_tokens", each).json() for each in counted)
    assert one == two


def test_a_conversation_without_thinking_extends_and_is_counted_as_it_is_sampled(
    gateway: RunningGateway,
) -> None:
    off = {"thinking": {"type": "disabled"}}
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/messages"
    said = gateway.post(path, BODIES["messages"] | off).json()
    history = [*HI, {"role": "assistant", "content": said["content"]}, *HI]
    body = {"messages": history, **off}
    count = gateway.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    reply = gateway.post(path, body | {"max_tokens": 9})
    assert [turn["relation"] for turn in gateway.turns(session)] == ["root", "extends"]
    assert reply.json()["usage"]["input_tokens"] == count


def test_a_sessions_effort_holds_for_calls_that_ask_for_none(gateway: RunningGateway) -> None:
    group = gateway.post("/groups", {"size": 2, "reasoning_effort": "none"}).json()["sessions"]
    for path, session in zip(BODIES, (gateway.session(reasoning_effort="none"), *group), strict=True):
        assert not thinks(gateway, session, path, BODIES[path]), path
        assert thinks(gateway, session, path, BODIES[path] | ON[path]), "the call's own wish counts first"
        assert thinks(gateway, gateway.session(), path, BODIES[path]), "without a choice the template decides"
        first, second = gateway.turns(session)
        assert first["sampling"]["used"]["thinking"] == {"enable_thinking": False}, path
        assert "thinking" not in first["sampling"]["asked"], path
        assert second["sampling"]["used"]["thinking"] == {"enable_thinking": True}, path
        view = gateway.get(f"/sessions/{session['session_id']}").json()
        assert view["reasoning_effort"] == "none", path
    exported = gateway.get("/admin/export", key="admin-key").text
    assert '"reasoning_effort":"none","thinking":null' in exported


def test_a_deployments_effort_holds_for_sessions_that_choose_none(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(reasoning_effort="none") as gateway:
        for path, body in BODIES.items():
            assert not thinks(gateway, gateway.session(), path, body), path
            assert thinks(gateway, gateway.session(reasoning_effort="high"), path, body), path
            reply = gateway.post(f"/v1/{path}", body)
            (turn,) = gateway.turns_of(reply)
            assert turn["sampling"]["used"]["thinking"] == {"enable_thinking": False}, path
        count = gateway.post("/v1/messages/count_tokens", {"messages": HI}).json()["input_tokens"]
        assert count == reply.json()["usage"]["input_tokens"], "of Messages, the last call"


@pytest.mark.parametrize("path", CONSTRAINED)
def test_a_grammar_fits_the_effort_of_the_session(gateway: RunningGateway, path: str) -> None:
    def grammar(session: dict[str, Any], **more: Any) -> str:
        assert not thinks(gateway, session, path, BODIES[path] | CONSTRAINED[path] | more)
        return str(gateway.engine.requests[-1]["sampling_params"]["structural_tag"])

    off = {"reasoning_effort": "none"} if path == "chat/completions" else {"reasoning": {"effort": "none"}}
    by_session = grammar(gateway.session(reasoning_effort="none"))
    assert by_session == grammar(gateway.session(), **off)
    assert thinks(gateway, gateway.session(), path, BODIES[path] | CONSTRAINED[path])
    assert by_session != gateway.engine.requests[-1]["sampling_params"]["structural_tag"]


def test_a_session_chooses_which_earlier_thoughts_its_prompts_keep(gateway: RunningGateway) -> None:
    for thinking, later in (("template", "rerendered"), ("all", "extends"), (None, "rerendered")):
        assert_prompts_keep(gateway, thinking, later)


def assert_prompts_keep(gateway: RunningGateway, thinking: str | None, later: str) -> None:
    session = gateway.session(thinking=thinking)
    gateway.engine.mind = "<think>\nwherefore\n</think>\n\nfine"
    messages: list[Any] = []
    for _ in range(3):
        messages += HI
        reply = gateway.post(f"/sessions/{session['session_id']}/v1/chat/completions", {"messages": messages})
        said = reply.json()["choices"][0]["message"]
        assert said["reasoning_content"] == "wherefore"
        messages.append({name: said[name] for name in ("role", "content")})
    turns = gateway.turns(session)
    assert [turn["relation"] for turn in turns] == ["root", later, later], thinking
    prompt = gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])
    assert prompt.count("wherefore") == (2 if thinking == "all" else 0)
    kept = {turn["sampling"]["used"].get("thinking", {}).get("thinking_retention") for turn in turns}
    assert kept == {"all" if thinking == "all" else None}
    assert gateway.get(f"/sessions/{session['session_id']}").json()["thinking"] == thinking


def test_a_session_may_keep_the_templates_way_where_the_deployment_keeps_all(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(thinking="all") as gateway:
        assert_prompts_keep(gateway, "template", "rerendered")


def test_no_think_in_a_users_text_stays_text(gateway: RunningGateway) -> None:
    said = {"messages": [{"role": "user", "content": "do it /no_think"}]}
    assert thinks(gateway, gateway.session(reasoning_effort="high"), "chat/completions", said)
    assert "do it /no_think" in gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])


def test_a_model_that_always_thinks_refuses_to_be_turned_off(backends: Backends, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "minimax-m2")
    backends.clear(None)
    with backends.gateway(model_path=model, renderer="minimax-m2") as gateway:
        for path, more in (("/sessions", {}), ("/groups", {"size": 2})):
            reply = gateway.post(path, {"reasoning_effort": "none", **more})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning_effort")
    with pytest.raises(SystemExit, match=r"gateway\.reasoning_effort: the thinking of this model cannot be"):
        create_app(GatewaySettings(model_path=model, renderer="minimax-m2", reasoning_effort="none"))
