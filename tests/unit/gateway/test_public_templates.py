"""Templates in the manner of public models: prompts are those of transformers, and turns extend."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.language.chat_messages import Message
from gateway.language.own_template import own_template
from gateway.language.render import ChatRenderer
from tests.support.gateway.families_agent import TOOL, Agent, call, result, sampled, told, user
from tests.support.gateway.families_models import CHATML, LLAMA, QWEN
from tests.support.gateway.own_templates import COMMAND_R_TOOLS, PUBLIC, R1, OwnModel
from trainer_service.model.base_weights import transformers_check
from weir.demo.student import THINKING_TEMPLATE

SYSTEM: Message = {"role": "system", "content": "Be brief."}
CALLED = told("", call(call_id="callnine9"))
SEEN = result("7", "callnine9")
ORDINARY: dict[str, list[Message]] = {
    "user": [user("hi")],
    "system": [SYSTEM, user("hi")],
    "turns": [SYSTEM, user("hi"), told("Hello \u00e9!"), user("  and then?\n")],
    "thought": [user("hi"), told("Yes.", reasoning_content="hm"), user("so?")],
    "call": [SYSTEM, user("look"), CALLED, SEEN],
    "after a call": [user("look"), CALLED, SEEN, told("It is 7."), user("sure?")],
}
ONE_USER = [user("Be brief.\n\nhi")]
ODD: dict[str, tuple[list[Message], list[list[Message]]]] = {
    "neighbours": ([user("one"), user("two")], [[user("one\n\ntwo")]]),
    "no system": ([SYSTEM, user("hi")], [ONE_USER]),
    "late system": (
        [user("a"), told("b"), SYSTEM, user("hi")],
        [[user("a"), told("b"), user("Be brief."), user("hi")], [user("a"), told("b"), *ONE_USER]],
    ),
    "two answers": ([user("a"), told("b"), told("c"), user("d")], [[user("a"), told("b\n\nc"), user("d")]]),
    "a user after a result": (
        [user("look"), CALLED, SEEN, user("so?")],
        [[user("look"), CALLED, SEEN, told(""), user("so?")]],
    ),
}
"""Conversations that some templates refuse, and what those get in their place: the first that they render."""


def made(name: str, directory: Path) -> Path:
    model = PUBLIC[name].make(directory)
    if name == "command-r":
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(COMMAND_R_TOOLS, encoding="utf-8")
    return model


@pytest.fixture(scope="module", params=sorted(PUBLIC))
def public(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ChatRenderer, Any]:
    """The name of a model, the gateway's renderer, and transformers' tokenizer."""
    from transformers import PreTrainedTokenizerFast

    directory = made(request.param, tmp_path_factory.mktemp("public") / "model")
    return request.param, ChatRenderer(directory), PreTrainedTokenizerFast.from_pretrained(directory)


def by_transformers(tokenizer: Any, messages: Sequence[Message], tools: Any) -> list[int] | None:
    """The ids of `apply_chat_template`; None if the template refuses the messages, or leaves one out."""
    given = json.loads(json.dumps(messages))
    for message in given:
        for each in message.get("tool_calls") or ():
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            given, tools=tools, add_generation_prompt=True, return_dict=False
        )
    except Exception:  # whatever a template raises
        return None
    text = tokenizer.decode(ids)
    return ids if all(message["content"].strip() in text for message in messages) else None


def test_prompts_are_those_of_transformers(public: tuple[str, ChatRenderer, Any]) -> None:
    name, renderer, theirs = public
    conversations = [(messages, [messages]) for messages in ORDINARY.values()]
    compared = 0
    for messages, instead in [*conversations, *ODD.values()]:
        for tools in (None, [TOOL]):
            with_calls = any(message.get("tool_calls") for message in messages)
            if (tools or with_calls) and not renderer.family.tools:
                continue
            texts = (by_transformers(theirs, each, tools) for each in (messages, *instead))
            if (expected := next(filter(None, texts), None)) is not None:
                assert renderer.render(messages, tools).tolist() == expected, (name, messages)
                compared += 1
    assert compared >= (14 if renderer.family.tools else 6), name


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_next_turn_extends_the_sampled_ids(name: str, tmp_path: Path) -> None:
    agent = Agent(ChatRenderer(made(name, tmp_path / "model"), thinking="all"), None, [SYSTEM])
    for text in ("hi", "and then?", "and then?"):
        prompt = agent.ask(user(text))
        assert prompt.relation == ("root" if text == "hi" else "extends")
        _, read = agent.answer(prompt, sampled(agent.renderer, prompt.prompt_ids, told("It is 7.")))
        agent.messages.append(told(read.content))
    assert agent.ask(user("one"), user("two")).relation == "extends"


def test_documents_are_written_as_by_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    own, theirs = own_template(made("command-r", tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for documents in (None, [], [{"title": "A", "text": "a"}, {"title": "B", "text": "b"}]):
        given: dict[str, Any] = {"documents": documents, "add_generation_prompt": True}
        expected = theirs.apply_chat_template(ORDINARY["turns"], tokenize=False, **given)
        assert own is not None
        assert own.text(ORDINARY["turns"], **given) == expected


# Templates that read messages in another form

CHAT = (
    "{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\n' }}CONTENT{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
BY_PARTS = {
    "a loop": "{%- for c in m.content %}{%- if c.type == 'text' %}{{- c.text }}{%- endif %}{%- endfor %}",
    "a filter": "{{- m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}",
    "the first part": "{{- m.content[0]['text'] }}",
    "an answer as text": "{{- m.content if m.content is string else m.content[0].text }}",
}
IN_TEXT = (
    "{%- if loop.first and tools %}{{- tools | tojson ~ '\n' }}{%- endif %}{{- m.content }}"
    '{%- for call in m.tool_calls or [] %}{{- \'<tool_call>\n{"name": "\' + call.function.name +'
    " '\", \"arguments\": ' + call.function.arguments + '}\n</tool_call>' }}{%- endfor %}"
)


@pytest.mark.parametrize("way", BY_PARTS)
def test_a_template_that_reads_parts_of_contents_gets_parts(way: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    template = CHAT.replace("CONTENT", BY_PARTS[way])
    OwnModel(template, CHATML, "<|im_end|>", tools=False).make(tmp_path)
    renderer, theirs = ChatRenderer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for messages in (ORDINARY["user"], ORDINARY["turns"], ODD["neighbours"][0], ODD["late system"][0]):
        parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        given: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
        assert renderer.render(messages, None).tolist() == theirs.apply_chat_template(parts, **given)
    agent = Agent(renderer, None, [SYSTEM])
    for relation in ("root", "extends"):
        prompt = agent.ask(user("hi"))
        assert prompt.relation == relation
        _, read = agent.answer(prompt, sampled(renderer, prompt.prompt_ids, told("It is 7.")))
        agent.messages.append(told(read.content))


def test_a_template_that_writes_the_text_of_arguments_gets_text(tmp_path: Path) -> None:
    model = replace(PUBLIC["hermes"], template=CHAT.replace("CONTENT", IN_TEXT))
    renderer = ChatRenderer(model.make(tmp_path))
    assert (renderer.family.tools, renderer.family.calls) == (True, "qwen3")
    prompt = renderer.tokenizer.decode(renderer.render(ORDINARY["call"], [TOOL]).tolist())
    assert f'"arguments": {CALLED["tool_calls"][0]["function"]["arguments"]}' in prompt


# A family's code, or the model's own template

MARCH = PUBLIC["llama3"].template.replace("December", "March")
EDITED = "You are the assistant of a shop."
TYPES: dict[str, tuple[str, OwnModel, str]] = {
    "Qwen3": ("qwen3", PUBLIC["qwen3"], ""),
    "Llama 3, which writes the date": ("llama", replace(PUBLIC["llama3"], special=LLAMA), ""),
    "Qwen3, edited": (
        "qwen3",
        replace(PUBLIC["qwen3"], template=THINKING_TEMPLATE.replace("# Tools", f"{EDITED}\\n\\n# Tools")),
        "With tools, it writes '",
    ),
    "Llama 3, edited": (
        "llama",
        replace(
            PUBLIC["llama3"], template=PUBLIC["llama3"].template.replace("December", "March"), special=LLAMA
        ),
        "With a user's message, it writes '",
    ),
    "Hermes on Llama": (
        "llama",
        replace(PUBLIC["hermes"], special=(*CHATML, *LLAMA)),
        "With a user's message, it writes '<|im_start|><|im_start|>user",
    ),
    "R1 on Qwen3": (
        "qwen3",
        replace(PUBLIC["r1-distill"], special=(*R1, *CHATML), ordinary=QWEN[3:]),
        "With a user's message, it writes '<|begin_of_sentence|><|User|>",
    ),
}
"""Models by their type, and where their template differs from that of the type's family."""


@pytest.mark.parametrize("name", TYPES)
def test_a_models_own_template_wins_where_it_differs_from_its_familys(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import PreTrainedTokenizerFast

    model_type, model, difference = TYPES[name]
    typed(model.make(tmp_path), model_type)
    with caplog.at_level("INFO"):
        renderer, theirs = ChatRenderer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    (line,) = (each for each in caplog.messages if ": chat template: " in each)
    assert (renderer.check.agrees, renderer.check.own_wins) == (not difference, bool(difference))
    template, ends, tokenizer = renderer.model_checks
    assert (template.check, template.outcome) == ("chat template", "differs" if difference else "right")
    assert (ends.check, ends.outcome) == ("end tokens", "differs" if renderer.foreign_stops else "right")
    # transformers gives a model of this type Qwen's rules for digits and accents, whatever its files say.
    assert (tokenizer == transformers_check(tmp_path)) == (model_type != "qwen3")
    assert difference in line
    assert ("set gateway.renderer to" in line) == bool(difference)
    assert renderer.family.name == ("own-template" if difference else renderer.check.family)
    for messages in ORDINARY.values():
        tools = [TOOL] if renderer.family.tools else None
        if tools or messages not in (ORDINARY["call"], ORDINARY["after a call"]):
            assert renderer.render(messages, tools).tolist() == by_transformers(theirs, messages, tools)
    said = told("", call()) if model.tools else told("It is 7.")
    ids = sampled(renderer, renderer.render([user("hi")], [TOOL] if model.tools else None), said)
    read = renderer.parse(ids, [TOOL], "t")
    assert bool(read.tool_calls) == model.tools, "the calls of an edited template are read as before"
    assert ChatRenderer(tmp_path, renderer.check.family).check.own_wins is False, "the setting decides"


def test_what_one_of_the_two_refuses_is_named_and_does_not_decide(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = "{%- if tools %}{{- raise_exception('no tools') }}{%- endif %}" + THINKING_TEMPLATE
    typed(replace(PUBLIC["qwen3"], template=refusing).make(tmp_path), "qwen3")
    check = ChatRenderer(tmp_path).check
    assert check.agrees
    assert "tools" in check.refused
    assert "not compared: tools, " in check.row.detail
    for source, words in (
        (b"{%- for", "is not valid"),
        (b"{{- 'x' * 9999999999 }}", "does not work"),
        (b"{{- messages | rarefilter }}", "No filter named 'rarefilter'"),
        (b"{{- '\xe9' }}", "is not in UTF-8"),
    ):
        (tmp_path / "chat_template.jinja").write_bytes(source)
        caplog.clear()
        check = ChatRenderer(tmp_path).check
        assert [each.levelname for each in caplog.records if words in each.getMessage()] == ["WARNING"]
        assert (check.agrees, check.own_wins) == (None, False)
        assert words in check.row.detail, "a template that cannot be used is no template"


def typed(directory: Path, model_type: str) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"model_type": model_type}), encoding="utf-8")


# Templates by name

DEFAULT, WITH_TOOLS = (
    "{{- messages[0].content ~ (tools is none) ~ (documents is none) }}",
    "{{- 'T' ~ messages[0].content }}",
)
NAMED = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": WITH_TOOLS}]
PLACES: dict[str, dict[str, Any]] = {
    "a list in tokenizer_config.json": {"tokenizer_config.json": {"chat_template": NAMED}},
    "one in tokenizer_config.json": {"tokenizer_config.json": {"chat_template": DEFAULT}},
    "files": {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": WITH_TOOLS},
    "a file and a list": {"chat_template.jinja": DEFAULT, "tokenizer_config.json": {"chat_template": NAMED}},
    "rag": {
        "chat_template.jinja": DEFAULT,
        "additional_chat_templates/rag.jinja": "{{- 'R' }}",
        "tokenizer_config.json": {"chat_template": "{{- 'old' }}"},
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_the_template_of_a_call_is_the_one_that_transformers_takes(place: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PUBLIC["zephyr"].make(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, PLACES[place])
    own, theirs = own_template(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert own is not None
    for tools in (None, [TOOL]):
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}
        expected = theirs.apply_chat_template([user("hi")], tokenize=False, **given)
        assert own.text([user("hi")], **given) == expected, tools
        assert expected.startswith("hi" if tools is None or "Jinja" in place else expected[:1])
    assert own.text([user("hi")], documents=[{"title": "t"}]) == "hiTrueFalse"


def test_additional_templates_and_an_old_file_have_what_transformers_lacks(tmp_path: Path) -> None:
    """Where transformers finds no default, the JSON files have it."""
    PUBLIC["zephyr"].make(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, {"chat_template.json": {"chat_template": DEFAULT}})
    old = own_template(tmp_path)
    assert old is not None
    assert old.text([user("hi")]) == "hiTrueTrue"
    write(tmp_path, {"additional_chat_templates/tool_use.jinja": WITH_TOOLS})
    both = own_template(tmp_path)
    assert both is not None
    assert [both.text([user("hi")], tools=tools) for tools in (None, [TOOL])] == ["hiTrueTrue", "Thi"]
    shutil.rmtree(tmp_path / "additional_chat_templates")
    write(tmp_path, {"chat_template.json": {"chat_template": [{"name": "rag", "template": "x"}]}})
    with pytest.raises(SystemExit, match="none of rag is named default"):
        own_template(tmp_path)


def write(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        file = directory / name
        file.parent.mkdir(exist_ok=True)
        if name.endswith(".json"):
            former = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            content = json.dumps(former | content)
        file.write_text(content, encoding="utf-8")
