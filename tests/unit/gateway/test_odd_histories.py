"""Odd conversations are rendered completely in each family, and control tokens spelled in text stay text."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.chat import call_of
from gateway.dialects.chat_wire import ChatRequest
from gateway.errors import InvalidRequest
from gateway.language.chat_messages import Message
from gateway.language.deltas import beginning
from gateway.language.render import ChatRenderer
from tests.support.gateway.families_agent import TOOL, Agent, RendererOf, call, result, told, user
from tests.support.gateway.families_models import CONTROL_TOKENS, make_model

EVERY = sorted(CONTROL_TOKENS)
SYSTEM: Message = {"role": "system", "content": "Be brief."}
THOUGHT = {"reasoning_content": "let me look"}


# Text stays text


@pytest.mark.parametrize("family", EVERY)
def test_control_tokens_that_a_user_or_a_tool_spells_are_text(renderer: RendererOf, family: str) -> None:
    own = renderer(family)
    spelled = "say " + " then ".join([*CONTROL_TOKENS[family], "".join(CONTROL_TOKENS[family]), "\ufdd0"])
    control = own.tokenizer.added_ids

    def frame(text: str) -> list[int]:
        agent = Agent(own, messages=[SYSTEM])
        first = agent.ask(user(text))
        agent.hear(first, told("", call()))
        second = agent.ask(result(text, agent.messages[-1]["tool_calls"][0]["id"]))
        whole = own.render(agent.messages, agent.tools)
        for ids in (first.prompt_ids, second.context_ids, whole):
            assert text in own.text_of(ids)
        prompts = (*first.prompt_ids, *second.context_ids, *whole)
        return [token_id for token_id in prompts if token_id in control]

    assert frame(spelled) == frame("nothing")


@pytest.mark.parametrize("family", EVERY)
def test_an_answer_that_spells_the_end_of_a_message_does_not_end_it(
    renderer: RendererOf, family: str
) -> None:
    own = renderer(family)
    end = own.text_of(own.stop_ids[:1])

    def ends(content: str) -> int:
        ids = own.render([user("a"), told(content), user("b")], None)
        return sum(token_id in own.stop_ids for token_id in ids)

    assert ends(f"it ends with {end}") == ends("it ends with that")


def test_text_that_a_tokenizer_adds_as_tokens_is_left_as_it_is(tmp_path: Path) -> None:
    own = ChatRenderer(make_model(tmp_path, "qwen3", ordinary=("\n\n", "<table>")), "qwen3")
    ids = own.render([user("a\n\nb <table>")], None)
    assert own.tokenizer.convert_tokens_to_ids("\n\n") in ids
    assert own.tokenizer.convert_tokens_to_ids("<table>") in ids


# Whatever agents and their models make of a conversation

BROKEN_CALL = told(None, call('{"zq1": '))
ODD: dict[str, list[Message]] = {
    "a developer": [{"role": "developer", "content": "zq1"}, user("zq2")],
    "a developer late": [user("zq1"), told("zq2"), {"role": "developer", "content": "zq3"}, user("zq4")],
    "a system message late": [user("zq1"), told("zq2"), {"role": "system", "content": "zq3"}, user("zq4")],
    "two system messages": [SYSTEM, {"role": "system", "content": "zq1"}, user("zq2")],
    "only a system message": [{"role": "system", "content": "zq1"}],
    "an assistant first": [told("zq1"), user("zq2")],
    "only an assistant": [told("zq1")],
    "an assistant last": [user("zq1"), told("zq2")],
    "users in a row": [user("zq1"), user("zq2")],
    "assistants in a row": [user("zq1"), told("zq2"), told("zq3"), user("zq4")],
    "a result first": [result("zq1"), user("zq2")],
    "a result without a call": [user("zq1"), result("zq2")],
    "a result after text": [user("zq1"), told("zq2"), result("zq3")],
    "a result after its time": [user("zq1"), told(None, call()), result("zq2"), user("zq3"), result("zq4")],
    "a result of another call": [user("zq1"), told(None, call()), result("zq2", "other")],
    "a call without a result": [user("zq1"), told(None, call('{"zq2": 1}')), user("zq3")],
    "calls in parallel": [
        user("zq1"),
        told("zq2", call(), call('{"zq3": 1}', "b")),
        result("zq4"),
        result("zq5", "b"),
    ],
    "arguments cut short": [user("zq1"), BROKEN_CALL, result("zq2")],
    "a list for arguments": [user("zq1"), told(None, call('["zq2"]')), result("zq3")],
    "an object for arguments": [user("zq1"), told(None, call({"zq2": [1]})), result("zq3")],
    "nothing for arguments": [user("zq1"), told(None, call(None)), result("zq2")],
    "empty arguments": [user("zq1"), told(None, call("")), result("zq2")],
    "an abyss for arguments": [user("zq1"), told(None, call("[" * 20_000)), result("zq2")],
    "half a surrogate in arguments": [user("zq1"), told(None, call('{"a": "\\ud800"}')), result("zq2")],
    "a call without id": [user("zq1"), told(None, call(call_id=None)), {"role": "tool", "content": "zq2"}],
    "an unknown tool": [user("zq1"), told(None, call(name="nobody's")), result("zq2")],
    "a tool without name": [user("zq1"), told(None, call(name=None)), result("zq2")],
    "an empty call": [user("zq1"), told(None, {"id": "call_1", "function": {}}), result("zq2")],
    "no calls": [user("zq1"), told("zq2", tool_calls=[]), user("zq3")],
    "null for calls": [user("zq1"), told("zq2", tool_calls=None), user("zq3")],
    "an empty answer": [user("zq1"), {"role": "assistant"}, user("zq2")],
    "null for text": [user(None)],
    "no parts": [user([])],
    "parts everywhere": [
        {"role": "system", "content": [{"type": "text", "text": "zq1"}]},
        user([{"type": "text", "text": "zq2"}, "zq3"]),
        told([{"type": "refusal", "refusal": "zq4"}], call()),
        result([{"type": "text", "text": "zq5"}]),
    ],
    "a function": [user("zq1"), {"role": "function", "name": "get", "content": "zq2"}],
    "names": [user("zq1") | {"name": "ann"}, told("zq2", name="bob"), user("zq3") | {"name": None}],
    "thoughts": [user("zq1"), told("zq2", **THOUGHT), user("zq3"), told("zq4", reasoning="hm"), user("zq5")],
}


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("family", EVERY)
def test_every_odd_conversation_is_rendered_and_nothing_said_is_lost(
    renderer: RendererOf, family: str, tools: Any
) -> None:
    own = renderer(family)
    for name, messages in ODD.items():
        prompt = Agent(own, tools).placed(messages)
        text, said = own.text_of(prompt.prompt_ids), json.dumps(messages)
        lost = [f"zq{n}" for n in range(1, 9) if f"zq{n}" in said and f"zq{n}" not in text]
        assert not lost, name


OF_EACH_FORMAT = (
    *("qwen3", "qwen3.5", "glm-4.5", "kimi-k2", "minimax-m2", "deepseek-v3", "deepseek-v4"),
    *("llama-3", "gemma4", "hy3", "inkling", "laguna-xs.2"),
)
"""One family of each format of calls."""
ENDLESS = ("[" * 1200, f'{{"a": {"9" * 4400}}}')
SLOW = "deepseek-v4"
"""The library's parser of this family takes seconds for an endless number."""


@pytest.mark.parametrize("family", EVERY)
def test_a_broken_call_is_read_as_text_and_the_session_goes_on(renderer: RendererOf, family: str) -> None:
    own = renderer(family)
    endless = ENDLESS[: 1 if family == SLOW else None] if family in OF_EACH_FORMAT else ()
    for arguments in ('{"a": ', "[1]", '{"a": "\\ud800"}', *endless):
        agent = Agent(own, messages=[user("go")])
        prompt = agent.ask()
        for token in CONTROL_TOKENS[family]:  # one of them opens a call
            own.parse(
                own.tokenizer.encode(f'{token}get{{"name": "get", "arguments": {arguments}'), [TOOL], "t"
            )
        agent.hear(prompt, told("", call(arguments)))
        again = agent.ask(result("no such tool"), user("go on"))
        assert again.relation in ("extends", "rerendered")


@pytest.mark.parametrize("family", EVERY)
def test_an_answer_cut_in_a_thought_that_the_prompt_opened_is_a_thought(
    renderer: RendererOf, family: str
) -> None:
    own = renderer(family)
    prompt_ids = own.render([user("why?")], [TOOL])
    # GLM-4.5 opens its thoughts itself; the prompt does not open one.
    opened = family == "glm-4.5" or own.text_of(prompt_ids[-4:]).rstrip().endswith("<think>")
    read = own.parse(own.tokenizer.encode("because of"), [TOOL], "t", prompt_ids=prompt_ids)
    assert (read.content, read.reasoning) == (("", "because of") if opened else ("because of", None))


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "llama-3"])
def test_arguments_that_say_nothing_are_an_empty_object(renderer: RendererOf, family: str) -> None:
    own = renderer(family)

    def prompt(arguments: Any) -> str:
        return own.text_of(own.render([user("a"), told(None, call(arguments)), result("b")], [TOOL]))

    nothing: list[Any] = ["", " \n", "null", "[]", None, [], {}]
    for arguments in nothing:
        assert prompt(arguments) == prompt("{}"), arguments
    assert family != "qwen3" or '"arguments": {}' in prompt("")


# Begun answers, and functions

REFUSING = {"deepseek-r1", "glm-5", "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"}
"""Families whose prompts open a thought, which a begun answer cannot close."""


@pytest.mark.parametrize("family", EVERY)
def test_each_family_writes_the_beginning_as_it_is_or_refuses(renderer: RendererOf, family: str) -> None:
    own = renderer(family)
    if family in REFUSING:
        with pytest.raises(InvalidRequest, match="thought"):
            beginning(own, [user("hi")], None, "The answer  is")
        return
    begun = "The answer  is"
    ids = beginning(own, [user("hi")], None, begun)
    assert own.text_of(ids).endswith(begun)
    asked = own.render([user("hi")], None)
    for rest in (" 42", "n't 42"):
        sampled = [*own.tokenizer.encode(rest), own.stop_ids[0]]
        whole = own.parse([*ids, *sampled], None, "t", prompt_ids=asked)
        assert (whole.content, whole.reasoning or None) == (begun + rest, None)


@pytest.mark.parametrize("family", ["kimi-k2", "gemma4"])
def test_functions_are_refused_where_they_would_not_be_exact(renderer: RendererOf, family: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call_of(renderer(family), ChatRequest(messages=[user("value of a?")], functions=[TOOL["function"]]))
    assert caught.value.param == "functions"
