"""No drift in any family of chat templates: the next call continues from the sampled tokens themselves."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.language import render
from gateway.language.chat_messages import Message
from gateway.language.families import FAMILIES, Thinking, family_of
from gateway.language.render import ChatRenderer
from gateway.language.thinking import ThinkingChoice, effort_of
from gateway.operators.prompt_reader import PromptReader
from rollout_queue.contract.packed_tokens import TokenIds
from tests.support.gateway.families_agent import (
    TOOL,
    Agent,
    RendererOf,
    as_sent_back,
    call,
    result,
    sampled,
    told,
    user,
)
from tests.support.gateway.families_models import CONTROL_TOKENS, make_model
from tests.support.hypothesis_profiles import examples

EVERY = sorted(CONTROL_TOKENS)
SYSTEM: Message = {"role": "system", "content": "Be brief."}
THOUGHT = {"reasoning_content": "let me look"}


def drawn(count: int) -> settings:
    return settings(
        max_examples=examples(count),
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def test_every_family_of_the_library_is_here_but_the_one_that_needs_the_network() -> None:
    assert set(FAMILIES) - set(CONTROL_TOKENS) == {"gpt-oss"}
    assert len(FAMILIES) > 12, "the documents say so"


# Prompts read back as messages

LAGUNAS = ("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2")
MARKS_IN_TEXT = {"deepseek-v4": {"tool"}} | {name: {"system", "user", "tool"} for name in LAGUNAS}
"""The roles whose messages a template marks in ordinary text, which is not read."""


@pytest.mark.parametrize("family", EVERY)
def test_the_messages_of_a_prompt_are_read_back(renderer: RendererOf, family: str) -> None:
    own, in_text = renderer(family), MARKS_IN_TEXT.get(family, set())
    asked = [SYSTEM, user("look\nhere <|im_start|>system"), told("Well.", call()), result("7 of 9")]
    asked += [told("It is 7."), user("so?")]
    for tools in (None, [TOOL]):
        ids = own.render(asked, tools).tolist()
        found = PromptReader(own.tokenizer).read(ids)
        for role in {"system", "user", "tool"} - in_text:
            given = [message["content"] for message in asked if message["role"] == role]
            read = [each.text for each in found if each.role == role]
            assert all(any(part in each for each in read) for part in given), (role, found)
            assert not any("It is 7." in each for each in read), found
        parts = [ids[each.start : each.end] for each in found if each.role == "assistant"]
        said = [own.parse(part, None, "t").content for part in parts]
        assert any("It is 7." in each for each in said), found
        assert in_text or not any("so?" in each for each in said), found
        whole = "".join(each.text for each in found)
        assert all(message["content"] in whole for message in asked), "no text is lost"


# What each template does to its history

FORGETFUL = (
    *("glm-4.5", "glm-5", "glm-5.1", "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    *("qwen3", "qwen3.5", "qwen3.6"),
)
"""The templates of these families drop past thoughts at the user's next message."""
AS_THE_TEMPLATE_HAS_IT = {
    **dict.fromkeys(EVERY, ("extends", "extends", "extends")),
    **dict.fromkeys(FORGETFUL, ("extends", "rerendered", "rerendered")),
    "deepseek-r1": ("rerendered", "rerendered", "rerendered"),
    "gemma4": ("extends", "rerendered", "extends"),
    "kimi-k2.5": ("extends", "rerendered", "extends"),
}
ALL_KEPT = {
    **dict.fromkeys(EVERY, ("extends", "extends", "extends")),
    "gemma4": ("extends", "rerendered", "extends"),
}
"""In Gemma, a call ends with the opening of its result, so that a user's message cannot follow it."""
KEEPING = (
    *("qwen3.6", "qwen3.8", "gemma4", "glm-5", "glm-5.1", "glm-5.3", "hy3", "deepseek-v4", "laguna-s-2.1"),
    *("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
)
"""Families whose own template has an option that keeps earlier thoughts."""
AS_FAR_AS_THE_TEMPLATE_KEEPS = {
    family: (ALL_KEPT if family in KEEPING else AS_THE_TEMPLATE_HAS_IT)[family] for family in EVERY
}


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [("template", AS_THE_TEMPLATE_HAS_IT), ("all", ALL_KEPT), ("auto", AS_FAR_AS_THE_TEMPLATE_KEEPS)],
    ids=["template", "all", "auto"],
)
@pytest.mark.parametrize("family", EVERY)
def test_a_result_after_a_call_then_a_user_after_a_call_then_a_user_after_text(
    renderer: RendererOf, family: str, thinking: Thinking, expected: dict[str, tuple[str, ...]]
) -> None:
    found = []
    for said, then in (
        (told(None, call(), **THOUGHT), result("ok")),
        (told(None, call(), **THOUGHT), user("and now?")),
        (told("it is a", **THOUGHT), user("and now?")),
    ):
        agent = Agent(renderer(family, thinking), messages=[SYSTEM])
        turn = agent.hear(agent.ask(user("what is it?")), said)
        prompt = agent.ask(then)
        assert prompt.parent == (turn if prompt.relation == "extends" else None)
        found.append(prompt.relation)
    assert tuple(found) == expected[family]


@pytest.mark.parametrize("family", [family for family in EVERY if family != "deepseek-r1"])
def test_twelve_rounds_of_tools_cost_each_token_once(renderer: RendererOf, family: str) -> None:
    agent = Agent(renderer(family), messages=[SYSTEM])
    prompt = agent.ask(user("add them all up"))
    for number in range(12):
        agent.hear(prompt, told(None, call(f'{{"n": {number}}}'), **THOUGHT))
        answered = agent.messages[-1]["tool_calls"][0]["id"]
        prompt = agent.ask(result(str(number), answered))
        assert prompt.relation == "extends"
    held = sum(len(turn.context_ids) + len(turn.output_ids) for turn in agent.head.turns)
    assert held + len(prompt.context_ids) == len(prompt.prompt_ids)


# Any message, sampled in any way, and sent back by a client

SPELLED = sorted({token for tokens in CONTROL_TOKENS.values() for token in tokens})
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["", " ", "\n\nx \n", "👩‍👩‍👧 é e\u0301", "漢字", "\ufdd0", "\ufffd"]),
    st.sampled_from(["<|im_end|>", "a</think>b", '{"a": 1}']),
    st.sampled_from(SPELLED),
)
ARGUMENTS = st.one_of(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2), TEXTS | st.integers() | st.lists(TEXTS, max_size=2)
    ).map(json.dumps),
    st.sampled_from(["{", "", "[1]", '"a"', "null"]),
)
ANSWERS = st.builds(
    lambda content, arguments, thought: told(
        content, *(call(each, f"call_{i}") for i, each in enumerate(arguments)), **thought
    ),
    TEXTS,
    st.lists(ARGUMENTS, max_size=3),
    st.sampled_from([{}, THOUGHT]),
)
NEXT = st.lists(
    st.one_of(
        TEXTS.map(user), TEXTS.map(result), st.builds(lambda text: {"role": "system", "content": text}, TEXTS)
    ),
    min_size=1,
    max_size=3,
)
ROUNDS = st.lists(
    st.tuples(NEXT, ANSWERS, st.sampled_from(["whole", "cut", "cut", "noise", "random"]), st.booleans()),
    min_size=1,
    max_size=4,
)


def disturbed(ids: list[int], how: str, draw: Callable[..., int], vocabulary: int) -> list[int]:
    """Ids that an engine may also sample: an answer without its end, or meaningless ids."""
    if how == "cut":
        return ids[: draw(1, len(ids))]
    if how == "noise":
        at = draw(0, len(ids) - 1)
        return [*ids[:at], *(draw(0, vocabulary - 1) for _ in range(3)), *ids[at:]]
    if how == "random":
        return [draw(0, vocabulary - 1) for _ in range(draw(1, 12))]
    return ids


@pytest.mark.parametrize("family", EVERY)
def test_nothing_that_was_sampled_is_ever_tokenised_again(renderer: RendererOf, family: str) -> None:
    @drawn(8)
    @given(st.data(), ROUNDS, st.sampled_from(["template", "all"]))
    def holds(data: st.DataObject, rounds: Any, thinking: Thinking) -> None:
        own = renderer(family, thinking)
        agent = Agent(own, messages=[SYSTEM, user("go")])
        vocabulary = own.config.vocab_size

        def draw(low: int, high: int) -> int:
            return data.draw(st.integers(low, high))

        for index, (then, said, how, reasoning) in enumerate(rounds):
            prompt = agent.ask(*then)
            assert prompt.relation in (("root",) if index == 0 else ("extends", "rerendered"))
            last = agent.head.turns[-1] if agent.head.turns else None
            if prompt.relation == "extends":
                assert prompt.parent == last
            if prompt.relation == "rerendered" and last is not None:
                before = TokenIds([*agent.head.branch_ids(last)[0], *last.output_ids])
                assert own.render(agent.messages, agent.tools)[: len(before)] != before
            ids = disturbed(sampled(own, prompt.prompt_ids, said), how, draw, vocabulary)
            turn, read = agent.answer(prompt, ids)
            assert turn.output_ids.tolist() == ids
            # On the wire, keys may change their order, and fields may be added.
            sent = json.dumps(
                as_sent_back(read, reasoning) | {"refusal": None, "annotations": []}, sort_keys=True
            )
            agent.messages.append(json.loads(sent))

    holds()


@pytest.mark.parametrize("family", EVERY)
def test_of_a_prompt_only_the_end_says_how_it_goes_on(
    renderer: RendererOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @drawn(5)
    @given(NEXT, NEXT, ANSWERS, st.integers(0, 30), st.sampled_from(["template", "all"]))
    def holds(then: Any, after: Any, said: Message, missing: int, thinking: Thinking) -> None:
        own = renderer(family, thinking)
        agent = Agent(own, messages=[user("long ago " * 90)])
        agent.hear(agent.ask(), told("yes " * 60, call(), **THOUGHT))
        prompt = agent.ask(*then)
        ids = TokenIds(sampled(own, prompt.prompt_ids, said)[: -missing or None] or [5])
        found = []
        for tail in (render.PROMPT_TAIL, 10**9):
            monkeypatch.setattr(render, "PROMPT_TAIL", tail)
            bridged = own.bridge(prompt.prompt_ids, ids, after, [TOOL], [*agent.messages, said])
            found.append((bridged, own.parse(ids, [TOOL], "t", prompt_ids=prompt.prompt_ids)))
            monkeypatch.undo()
        assert found[0] == found[1]
        own_context = own.bridge(prompt.context_ids, ids, after, [TOOL], [*agent.messages, said])
        assert own_context == found[0][0]

    holds()


# Which family


def test_a_model_is_known_by_its_name_before_its_type(tmp_path: Path) -> None:
    assert family_of("auto", tmp_path / "Qwen3-8B", "anything").name == "qwen3"
    assert family_of("auto", tmp_path / "DeepSeek-R1", "deepseek_v3").name == "deepseek-r1"
    assert family_of("auto", tmp_path / "mine", "qwen3_moe").name == "qwen3"
    assert family_of("llama-3", tmp_path / "Qwen3-8B", "qwen3").name == "llama-3"


def test_a_model_that_nobody_knows_ends_the_start_with_the_names(tmp_path: Path) -> None:
    names = r"set gateway\.renderer to one of deepseek-r1, "
    llama = make_model(tmp_path, "llama-3")
    with pytest.raises(SystemExit, match=names):
        family_of("qwen9", tmp_path, "mamba")
    with pytest.raises(SystemExit, match=names):
        ChatRenderer(llama)
    with pytest.raises(SystemExit, match="does not fit the model"):
        ChatRenderer(llama, "qwen3")


def test_a_model_that_never_thinks_serves_any_effort_and_refuses_the_switch(renderer: RendererOf) -> None:
    llama = renderer("llama-3")
    for wish in (effort_of("low", "effort"), ThinkingChoice(on=True, budget=1024), ThinkingChoice(on=False)):
        assert llama.thinking(wish, "thinking") == (llama, ()), wish
    with pytest.raises(InvalidRequest, match="this model does not think"):
        llama.thinking(ThinkingChoice(on=True), "chat_template_kwargs.enable_thinking")


# What the files say of the model

SAID: dict[str, tuple[dict[str, Any], int]] = {
    "n_positions": ({"max_position_embeddings": None, "n_positions": 512}, 512),
    "seq_length": ({"max_position_embeddings": None, "seq_length": 512}, 512),
    "a part for text": ({"text_config": {"vocab_size": 777, "max_position_embeddings": 512}}, 512),
    "a part for text that says nothing": ({"text_config": {"vocab_size": None}}, 32768),
    "another name of the part": (
        {"max_position_embeddings": None, "llm_config": {"max_position_embeddings": 512}},
        512,
    ),
    "no vocabulary": ({"vocab_size": None}, 32768),
    "no type": ({"model_type": None}, 32768),
    "experts by layer": ({"num_experts_per_tok": [2, 4]}, 32768),
    "numbers that JSON does not have": ({"time_step_limit": [0.0, float("inf")]}, 32768),
}
UNSAID: dict[str, tuple[dict[str, Any], str]] = {
    "no context": ({"max_position_embeddings": None}, "set gateway.context_length"),
    "a context in words": ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
    "a vocabulary in words": ({"vocab_size": "many"}, "vocab_size is 'many'"),
}


def make_configured(directory: Path, changes: dict[str, Any]) -> Path:
    file = make_model(directory, "qwen3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return directory


@pytest.mark.parametrize("name", SAID)
def test_what_config_json_says_in_its_own_way_is_read(name: str, tmp_path: Path) -> None:
    changes, context = SAID[name]
    renderer = ChatRenderer(make_configured(tmp_path, changes), "qwen3")
    assert renderer.context_length == context
    said = changes.get("text_config", {}).get("vocab_size")
    assert renderer.config.vocab_size == (said or renderer.tokenizer.vocabulary_size)


@pytest.mark.parametrize("name", UNSAID)
def test_what_config_json_does_not_say_ends_the_start_in_a_sentence(name: str, tmp_path: Path) -> None:
    changes, sentence = UNSAID[name]
    with pytest.raises(SystemExit, match=sentence):
        ChatRenderer(make_configured(tmp_path, changes), "qwen3")
    if "gateway" in sentence:
        assert ChatRenderer(tmp_path, "qwen3", context_length=99).context_length == 99


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff\xfe{}", b"version https://git-lfs"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_of_the_model_that_cannot_be_read_is_named(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    file = make_model(tmp_path, "qwen3") / name
    if content is not None:
        file.write_bytes(content)
    elif name == "config.json":
        file.unlink()
    else:
        return
    with pytest.raises(SystemExit, match=re.escape(name)) as ended:
        ChatRenderer(tmp_path, "qwen3")
    assert "\n" not in str(ended.value)


ENDS: dict[str, tuple[Any, list[int] | None]] = {
    "one": (5, [5]),
    "several": ([5, 6, 5], [5, 6]),
    "none": (None, []),
    "an empty list": ([], []),
    "no such token": ([-1, 10**6, 2**40], []),
    "text": ("<|im_end|>", None),
    "a fraction": (5.0, None),
    "yes": (True, None),
    "an object": ({"id": 5}, None),
    "lists of lists": ([[5]], None),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("place", ["config.json", "text_config", "generation_config.json"])
def test_end_tokens_are_those_that_all_files_name_or_are_refused(
    name: str, place: str, tmp_path: Path
) -> None:
    said, expected = ENDS[name]
    config = make_model(tmp_path, "qwen3") / "config.json"
    own = [] if place == "config.json" else [json.loads(config.read_text(encoding="utf-8"))["eos_token_id"]]
    given, file = {"eos_token_id": said}, tmp_path / place
    if place == "text_config":
        given, file = {place: given}, config
    former = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(former | given), encoding="utf-8")
    if expected is None:
        with pytest.raises(SystemExit, match="eos_token_id is "):
            ChatRenderer(tmp_path, "qwen3")
        return
    renderer = ChatRenderer(tmp_path, "qwen3")
    template = set(renderer.template.get_stop_token_ids())
    assert set(renderer.stop_ids) - template == {*expected, *own} - template


def test_the_end_token_of_an_older_tokenizer_is_in_a_file_of_its_own(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", ordinary=("<end>",))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<end>"}}')
    renderer = ChatRenderer(tmp_path, "qwen3")
    assert renderer.tokenizer.convert_tokens_to_ids("<end>") in renderer.stop_ids
