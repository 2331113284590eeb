"""Where a call is placed in its session's tree: its parent, its relation, and the reason for a fork."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from renderers import create_renderer

from gateway.generations.digests import chain
from gateway.language.chat_messages import Message
from gateway.language.render import ChatRenderer
from gateway.language.tokenizer import BareTokenizer
from rollout_queue.contract.records import Turn
from tests.support.gateway.families_agent import (
    TOOL,
    Agent,
    as_sent_back,
    call,
    renderer_of,
    result,
    sampled,
    told,
    user,
)

SYSTEM: Message = {"role": "system", "content": "You are the main agent."}
LOOKER: Message = {"role": "system", "content": "You look keys up."}
SUMMARY = user("So far: a = 1.")
LONG = ("a long report " * 30).strip()


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A template that keeps its history, so that a fork has only the cause that the test gives it."""
    return renderer_of(tmp_path_factory.mktemp("conversation"), "kimi-k2")


@pytest.fixture
def agent(renderer: ChatRenderer) -> Agent:
    return Agent(renderer, messages=[SYSTEM])


def three_turns(agent: Agent) -> list[Turn]:
    """Three turns: two tool calls and an answer."""
    agent.hear(agent.ask(user("what are a and b?")), told(LONG, call('{"key": "a", "n": 1}')))
    agent.hear(agent.ask(result("a = 1", last_id(agent))), told(LONG, call('{"key": "b"}')))
    agent.hear(agent.ask(result("b = 2", last_id(agent))), told("1 and 2"))
    assert [turn.relation for turn in agent.head.turns] == ["root", "extends", "extends"]
    return list(agent.head.turns)


def last_id(agent: Agent) -> str:
    found: str = agent.messages[-1]["tool_calls"][0]["id"]
    return found


# The same conversation, however it is written


def blocks(message: Message) -> Message:
    content = message.get("content")
    return (
        message | {"content": [{"type": "text", "text": content}]} if content else message | {"content": []}
    )


def stamped(message: Message) -> Message:
    calls = [
        made | {"id": f"{made['id']}-x", "index": i} for i, made in enumerate(message.get("tool_calls") or ())
    ]
    return message | {"index": 3, "id": "msg_1", "name": None, "refusal": None, "tool_calls": calls or None}


def cached(message: Message) -> Message:
    text = {"type": "text", "text": message.get("content") or "", "cache_control": {"type": "ephemeral"}}
    return message | {"content": [text]}


def respaced(message: Message) -> Message:
    calls = [
        made | {"function": made["function"] | {"arguments": turned(made["function"]["arguments"])}}
        for made in message.get("tool_calls") or ()
    ]
    return message | ({"tool_calls": calls} if calls else {})


def turned(arguments: str) -> str:
    """The same JSON with its keys in another order and other spaces."""
    return json.dumps(dict(reversed(json.loads(arguments).items())), indent=2)


def padded(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return message | {"content": f"\n {message.get('content') or ''}\n"}


def shuffled(message: Message) -> Message:
    return dict(reversed(message.items()))


def developed(message: Message) -> Message:
    return message | {
        "role": {"system": "developer", "tool": "function"}.get(message["role"], message["role"])
    }


@pytest.mark.parametrize("written", [blocks, stamped, cached, respaced, padded, shuffled, developed])
def test_a_history_written_otherwise_is_the_same_history(
    agent: Agent, written: Callable[[Message], Message]
) -> None:
    *_, last = three_turns(agent)
    agent.messages = [written(message) for message in agent.messages]
    prompt = agent.ask(user("thanks"))
    assert (prompt.relation, prompt.parent) == ("extends", last)


# What a template adds by itself


def test_a_conversation_begins_with_the_date_of_its_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renderer reads the date when it is created, as the renderer of gpt-oss does."""
    day = ["2026-01-31"]

    def dated(tokenizer: BareTokenizer, *given: Any) -> Any:
        renderer, date = create_renderer(tokenizer, *given), tokenizer.encode(day[0])
        undated = renderer.render_ids
        monkeypatch.setattr(renderer, "render_ids", lambda *said, **more: date + undated(*said, **more))
        return renderer

    monkeypatch.setattr("gateway.language.own_choice.create_renderer", dated)
    monkeypatch.setattr(ChatRenderer, "today", lambda _: day[0])
    renderer = renderer_of(tmp_path, "kimi-k2")
    for day[0] in ("2026-01-31", "2026-01-31", "2026-02-01"):
        prompt = Agent(renderer).ask(user("what day is it?"))
        assert renderer.text_of(prompt.prompt_ids.tolist()).startswith(day[0])


# Another conversation


def test_other_words_are_another_history(agent: Agent) -> None:
    first, *_ = three_turns(agent)
    for index, changed in ((1, "what are c and d?"), (2, "a short report")):
        messages = [*agent.messages]
        messages[index] = messages[index] | {"content": changed}
        assert agent.placed([*messages, user("thanks")]).parent is None
    messages = [*agent.messages[:3], result("a = 5"), *agent.messages[4:]]
    assert agent.placed([*messages, user("thanks")]).parent == first


# Forks, and why


FORKS: dict[str, tuple[Callable[[list[Message]], list[Message]], str, int | None]] = {
    "a second continuation": (lambda said: [*said[:3], result("a = 5")], "history_edited", 0),
    "an answer rewritten late": (
        lambda said: [*said[:4], told("I looked b up"), user("it is 2"), user("so?")],
        "history_edited",
        0,
    ),
    "an answer rewritten first": (
        lambda said: [*said[:2], told("Calling get"), user("Observation: a = 1")],
        "history_edited",
        None,
    ),
    "the first call again": (lambda said: said[:2], "sampled_again", None),
    "the second call again": (lambda said: said[:4], "sampled_again", 0),
    "another system prompt": (lambda _: [LOOKER, user("look a up")], "sub_agent", None),
    "a summary in place of a part": (
        lambda said: [*said[:2], SUMMARY, *said[4:], user("go on")],
        "compaction",
        None,
    ),
    "a summary in place of all": (
        lambda _: [SYSTEM, SUMMARY, told("I know"), user("go on")],
        "compaction",
        None,
    ),
    "a longer history in its place": (lambda said: [*said[:2], user(LONG * 9)], "history_edited", None),
    "another task": (lambda _: [SYSTEM, user("what is the weather?")], "new_conversation", None),
}
"""Histories after `three_turns`, the reason of the fork, and the last turn that it shares."""


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_has_its_reason_and_hangs_off_the_last_turn_that_it_shares(agent: Agent, name: str) -> None:
    turns = three_turns(agent)
    history, reason, parent = FORKS[name]
    prompt = agent.placed(history(agent.messages))
    assert (prompt.relation, prompt.reason) == ("forks", reason)
    assert prompt.parent == (None if parent is None else turns[parent])


def test_a_sub_agent_goes_on_beside_its_parent(agent: Agent) -> None:
    three_turns(agent)
    sub = Agent(agent.renderer, None, [LOOKER], agent.head)
    began = sub.hear(sub.ask(user("look a up")), told("a = 1"))
    assert began.reason == "sub_agent"
    prompt = sub.ask(user("and b"))
    assert (prompt.relation, prompt.parent) == ("extends", began)
    agent.head = sub.head
    assert agent.ask(user("thanks")).relation == "extends"


def test_other_tools_for_the_same_conversation_are_named(agent: Agent) -> None:
    three_turns(agent)
    for tools in (None, [TOOL, TOOL]):
        prompt = agent.placed([*agent.messages, user("thanks")], tools)
        assert (prompt.relation, prompt.reason, prompt.parent) == ("forks", "tools_changed", None)


def test_an_aborted_answer_is_no_part_of_the_history(agent: Agent) -> None:
    prompt = agent.ask(user("hello"))
    agent.answer(prompt, sampled(agent.renderer, prompt.prompt_ids, told("half an ans")), "abort")
    again = agent.placed(agent.messages)
    assert (again.relation, again.reason, again.parent) == ("root", None, None)


def test_of_two_samples_that_read_the_same_the_client_names_its_own(agent: Agent) -> None:
    said = told(None, call('{"key": "a"}'))
    prompt = agent.ask(user("a?"))
    ids = sampled(agent.renderer, prompt.prompt_ids, said)
    turns = []
    for _ in range(2):
        turn, read = agent.answer(prompt, ids)
        turns.append((turn, as_sent_back(read)))
    for turn, message in turns:
        message["tool_calls"][0]["id"] = f"call_{turn.turn_id}_0"
        follow = agent.placed([*agent.messages, message, result("a = 1", f"call_{turn.turn_id}_0")])
        assert follow.parent == turn


def test_a_history_that_the_template_renews_keeps_the_turns_before_it(tmp_path: Path) -> None:
    agent = Agent(renderer_of(tmp_path, "qwen3"), messages=[SYSTEM])
    prompt = agent.ask(user("one"))
    plain, read = agent.answer(
        prompt, [*agent.renderer.tokenizer.encode("I see"), agent.renderer.stop_ids[0]]
    )
    agent.messages.append(as_sent_back(read))
    agent.hear(agent.ask(user("two")), told("hm", reasoning_content="a thought"))
    assert agent.head.turns[-1].parent_id == plain.turn_id
    prompt = agent.ask(user("three"))
    assert (prompt.relation, prompt.reason, prompt.parent) == (
        "rerendered",
        "template_rewrites_history",
        plain,
    )


def test_digests_tell_system_prompt_and_tools_apart() -> None:
    one, two = chain([TOOL], [SYSTEM, user("a")]), chain(None, [SYSTEM, user("a")])
    assert one[-1][:24] == two[-1][:24]
    assert one[-1][24:] != two[-1][24:]
    other = chain([TOOL], [user("a")])
    assert one[-1][24:] == other[-1][24:]
    assert one[-1][16:24] != other[-1][16:24]


def test_every_thought_is_kept_where_the_deployment_says_so(tmp_path: Path) -> None:
    for thinking, relation in (("template", "rerendered"), ("all", "extends")):
        agent = Agent(renderer_of(tmp_path, "qwen3", thinking), messages=[SYSTEM])
        agent.hear(agent.ask(user("one")), told("two", reasoning_content="a thought"))
        prompt = agent.ask(user("three"))
        assert prompt.relation == relation
        assert ("a thought" in agent.renderer.text_of(prompt.prompt_ids)) == (thinking == "all")
