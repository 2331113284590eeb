"""Whatever a policy samples is answered and recorded; the answer, sent back, extends the session."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.language.families import ToolPrompt
from gateway.language.render import ChatRenderer
from gateway.language.tokenizer import BYTE_OF
from tests.support.gateway.echoes import (
    ChatClient,
    Client,
    CompletionsClient,
    MessagesClient,
    ResponsesClient,
    TokenClient,
    ask,
)
from tests.support.gateway.families_models import make_model
from tests.support.gateway.own_templates import MODELS, THOUGHTFUL
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.hypothesis_profiles import examples
from tests.support.waiting import wait_until

THOUGHT = "<think>\nlet me see: é 👩‍👩‍👧\n</think>\n\n"
JSON_CALL = '<tool_call>\n{"name": "get", "arguments": {"key": "é", "n": [1, 2.50, 1e3]}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=get>\n<parameter=key>\né\n</parameter>\n</function>\n</tool_call>"
DEEP = "[" * 70 + "]" * 70
FORMS = (
    "It is sunny. 日本語 👩‍👩‍👧\n",
    "  \n two \u2028 lines \x00 ",
    THOUGHT,
    JSON_CALL,
    XML_CALL,
    '<tool_call>\n{"name": "get", "arguments": {"key": NaN, "key": "\\ud800", "n": -1e999}}\n</tool_call>',
    '<tool_call>{"name":"get","arguments":[]}</tool_call> and',
    "<tool_call>\n<function=get>\n<parameter=key>\nInfinity\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n{broken\n</tool_call>",
    f'<tool_call>\n{{"name": "get", "arguments": {DEEP}}}\n</tool_call>',
    f"<tool_call>\n<function=get>\n<parameter=n>\n{DEEP}\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n",
    "</think>",
    "",
)
"""Thoughts, calls and text, sound ones and broken ones."""
EMPTY_THOUGHT = re.compile(r"(<think>)*\s*(</think>)?\s*")
ENDS = ("<|im_end|>", "<|endoftext|>")


def two_ends(path: Path) -> Path:
    """The model, with a generation_config.json that names both ends, where config.json names one."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ends = {"eos_token_id": [tokenizer.token_to_id(end) for end in ENDS]}
    (path / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    return path


MODELS_BY_NAME: dict[str, Callable[[Path], Path]] = {
    "qwen3": lambda path: make_model(path, "qwen3"),
    "qwen3.5": lambda path: make_model(path, "qwen3.5"),
    "own-template": lambda path: two_ends(MODELS["qwen2.5"].make(path)),
    "own-template that thinks": THOUGHTFUL.make,
    "own-template without tools": MODELS["gemma3"].make,
}


@dataclass
class Model:
    """A gateway for one model, and what its engine may sample."""

    gateway: RunningGateway
    renderer: ChatRenderer
    tokenizer: Tokenizer

    @property
    def drops_thoughts(self) -> bool:
        return self.renderer.family.thinks

    def session(self, ids: list[int], end: str = ENDS[0], **asked: str) -> str:
        """A new session, in which the engine first samples these ids and this end."""
        engine = self.gateway.engine
        engine.script.clear()
        engine.script.append(ids)
        engine.end = end
        session: str = self.gateway.session(**asked)["session_id"]
        return session

    def relations(self, session: str) -> list[str]:
        return [turn["relation"] for turn in self.gateway.turns({"session_id": session})]

    def sampled(self) -> st.SearchStrategy[list[int]]:
        """Random ids, and the ids of well-formed answers of which some bytes were changed."""
        stops = set(self.renderer.stop_ids)
        ids = [token_id for token_id in range(self.tokenizer.get_vocab_size()) if token_id not in stops]
        texts = st.lists(st.sampled_from(FORMS), max_size=4).map("".join)
        changed = st.builds(_changed, texts, st.lists(_CHANGES, max_size=3)).map(self.ids_of)
        return st.lists(st.sampled_from(ids), max_size=12) | changed

    def ids_of(self, data: bytes) -> list[int]:
        """The ids of a text; of bytes that are no text, one for each byte."""
        try:
            ids = self.tokenizer.encode(data.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            chars, vocabulary = {byte: char for char, byte in BYTE_OF.items()}, self.tokenizer.get_vocab()
            ids = [vocabulary[chars[byte]] for byte in data]
        return [token_id for token_id in ids if token_id not in self.renderer.stop_ids]


_CHANGES = st.tuples(
    st.integers(0, 400), st.sampled_from(["cut", "drop", "put", "twice"]), st.binary(max_size=3)
)


def _changed(text: str, changes: list[tuple[int, str, bytes]]) -> bytes:
    data = text.encode()
    for place, how, more in changes:
        at = place % (len(data) + 1)
        match how:
            case "cut":
                data = data[:at]
            case "drop":
                data = data[:at] + data[at + 1 + len(more) :]
            case "put":
                data = data[:at] + more + data[at:]
            case "twice":
                data = data[:at] + data[max(0, at - 9) :]
    return data


@pytest.fixture(scope="module")
def models(backends: Backends, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    with ExitStack() as started:
        made = {}
        for name, make in MODELS_BY_NAME.items():
            path = make(tmp_path_factory.mktemp("model") / "model")
            family = "own-template" if name.startswith("own") else name
            prompt: ToolPrompt = "hermes" if name.endswith("without tools") else "none"
            given = {"model_path": path, "renderer": family, "tool_prompt": prompt, "poll_every_s": 0.5}
            gateway = started.enter_context(backends.gateway(**given))
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            renderer = ChatRenderer(path, family, tool_prompt=prompt)
            made[name] = Model(gateway, renderer, tokenizer)
        yield made


def fresh(models: dict[str, Model], backends: Backends, name: str) -> Model:
    """The model, with an empty Redis."""
    model = models[name]
    backends.clear(backends.secret())
    model.gateway.engine = backends.engine
    model.gateway.engine.tokenizer = model.tokenizer
    wait_until(lambda: model.gateway.get("/ready").status_code == 200)
    return model


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", MODELS_BY_NAME)
def test_whatever_is_sampled_is_answered_and_sent_back(
    models: dict[str, Model], backends: Backends, name: str
) -> None:
    model = fresh(models, backends, name)
    gateway, prompt = model.gateway, model.renderer.tokenizer.encode("look")

    ends = [model.tokenizer.id_to_token(end) for end in model.renderer.stop_ids]

    def clients() -> list[Client]:
        chat = [ChatClient(), ChatClient(thoughts=True)]
        return [*chat, MessagesClient(), ResponsesClient(), CompletionsClient(prompt), TokenClient(prompt)]

    @settings(max_examples=examples(100), deadline=None)
    @given(model.sampled(), st.integers(0, 5), st.booleans(), st.sampled_from(ends), st.booleans())
    def holds(ids: list[int], which: int, stream: bool, end: str, keeps: bool) -> None:
        client, session = clients()[which], model.session(ids, end, **({"thinking": "all"} if keeps else {}))
        heard = ask(gateway, session, client, stream)
        if heard.token_bytes is not None and not (heard.calls or heard.thought):
            joined, said = b"".join(heard.token_bytes).decode(errors="replace").strip(), heard.content.strip()
            assert joined.endswith(said)
            assert EMPTY_THOUGHT.fullmatch(joined.removesuffix(said))
        assert (heard.reasoning_tokens > 0) <= bool(heard.thought)
        ask(gateway, session, client, stream)
        dropped = heard.thought and not heard.calls and not keeps and model.drops_thoughts
        assert model.relations(session) == ["root", "rerendered" if dropped else "extends"]

    holds()


# What holds for each kind of answer

IN_WORDS = ("chat", "messages", "responses")


def client_of(api: str) -> ChatClient | MessagesClient | ResponsesClient:
    if api == "chat":
        return ChatClient()
    return MessagesClient() if api == "messages" else ResponsesClient()


@pytest.mark.parametrize(("api", "stream"), [(api, stream) for api in IN_WORDS for stream in (False, True)])
def test_an_answer_that_is_no_text_comes_back(
    models: dict[str, Model], backends: Backends, api: str, stream: bool
) -> None:
    """Nothing, blanks, blanks around words, calls that were cut or are malformed."""
    model = fresh(models, backends, "qwen3")
    for said in ("", " \n", "\n\n so \n", *UNREADABLE_CALLS):
        client, session = client_of(api), model.session(model.ids_of(said.encode()))
        heard = ask(model.gateway, session, client, stream)
        assert heard.content.strip() == said.strip()
        if not heard.content:  # some clients leave empty fields out
            client.history[1] = {
                name: value for name, value in client.history[1].items() if name != "content"
            }
        ask(model.gateway, session, client, stream)
        assert model.relations(session) == ["root", "extends"], said


UNREADABLE_CALLS = (
    "<tool_call>\n{broken\n</tool_call>",
    'Look: <tool_call>\n{"name": "get", "argu',
    '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call> and <tool_call>\n[1]\n</tool_call> more',
    "<tool_call>",
)
ARGUMENTS = (
    '{"key": NaN, "n": [Infinity, -Infinity, 1e999]}',
    '{"key": "\\ud800 \\u00e9", "n": "\\udc00"}',
    '{"key": NaN, "n": "\\ud800"}',
    '{"key": 1, "key": 2}',
    '{ "key" :1.0,"n":\t[ 1 ,2 ]\n}',
    '{"n": 123456789012345678901234567890, "m": 1E5}',
    "{}",
    "[1]",
    '{"__raw_arguments": "{}"}',
    '{"key": ' * 64 + "1" + "}" * 64,
)


@pytest.mark.parametrize(("api", "stream"), [(api, stream) for api in IN_WORDS for stream in (False, True)])
def test_arguments_reach_the_agent_as_they_were_sampled(
    models: dict[str, Model], backends: Backends, api: str, stream: bool
) -> None:
    """In Messages, whose input is an object, as an object that says the same; if there is none, as text."""
    model = fresh(models, backends, "qwen3")
    for arguments in ARGUMENTS:
        call = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'
        client, session = client_of(api), model.session(model.ids_of(call.encode()))
        ask(model.gateway, session, client, stream)
        (given,) = client.given()
        if api != "messages":
            assert given == arguments
        elif given.keys() == {"__raw_arguments"}:
            assert given["__raw_arguments"] == arguments
            odd = ("NaN", "\\ud800", "__raw_arguments")
            assert arguments == "[1]" or any(each in arguments for each in odd)
        else:
            assert given == json.loads(arguments)
        ask(model.gateway, session, client, stream)
        assert model.relations(session) == ["root", "extends"], arguments


TOO_MUCH = ('{"n": ' + "9" * 5000 + "}", *("[" * depth + "]" * depth for depth in (65, 985, 2000)))
"""Arguments that Python's JSON does not read, or only where its stack is short."""


@pytest.mark.parametrize(("api", "stream"), [(api, stream) for api in IN_WORDS for stream in (False, True)])
def test_a_call_that_python_cannot_read_is_text_and_the_calls_before_it_stay_calls(
    models: dict[str, Model], backends: Backends, api: str, stream: bool
) -> None:
    model = fresh(models, backends, "qwen3")
    for arguments in TOO_MUCH:
        bad = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call> so'
        client, session = client_of(api), model.session(model.ids_of(f"{THOUGHT}{JSON_CALL}\n{bad}".encode()))
        room = {"max_tokens": 20_000} if api == "messages" else {}
        heard = ask(model.gateway, session, client, stream, **room)
        assert (heard.thought.strip(), heard.content.strip()) == (THOUGHT[8:-10].strip(), bad)
        assert len(heard.calls) == 1
        ask(model.gateway, session, client, stream)
        assert model.relations(session) == ["root", "extends"], arguments[:20]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_thought_too_and_is_in_no_part_of_the_answer(
    models: dict[str, Model], backends: Backends, stream: bool
) -> None:
    model = fresh(models, backends, "qwen3")
    said = "<think>\nfirst one STOP then</think>\n\nforty two"
    for stop, thought, content in (
        ("STOP", "first one", ""),
        ("one STOP", "first", ""),
        ("then</think>\n\nfor", "first one STOP", ""),
        ("</think>", "first one STOP then", ""),
        ("\n\nforty", "first one STOP then", ""),
        ("ty", "first one STOP then", "for"),
        ("never", "first one STOP then", "forty two"),
    ):
        for client, name in ((ChatClient(), "stop"), (MessagesClient(), "stop_sequences")):
            session = model.session(model.ids_of(said.encode()))
            heard = ask(model.gateway, session, client, stream, **{name: [stop]})
            assert (heard.thought.strip(), heard.content.strip()) == (thought, content), stop


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_thought_are_counted(models: dict[str, Model], backends: Backends, stream: bool) -> None:
    model = fresh(models, backends, "qwen3")
    one_by_one = [each for char in "think so" for each in model.ids_of(char.encode())]
    for said in (model.ids_of(b"\nlet me see\n"), one_by_one):
        ids = [*model.ids_of(b"<think>"), *said, *model.ids_of(b"</think>\n\nforty two")]
        for client in (ChatClient(), ResponsesClient()):
            heard = ask(model.gateway, model.session(ids), client, stream)
            assert heard.reasoning_tokens == len(said)


EMOJI = "\U0001f469\u200d\U0001f467 \u65e5\u672c \u00e9"


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_tokens_are_those_of_the_text(
    models: dict[str, Model], backends: Backends, stream: bool
) -> None:
    """Also where a character is split among tokens, whose names are then those of their bytes."""
    model = fresh(models, backends, "qwen3")
    ids, parts = model.ids_of(EMOJI.encode()), model.ids_of(b"\xf0\x9f\x91")
    for client in (ChatClient(), ResponsesClient()):
        heard = ask(model.gateway, model.session(ids), client, stream)
        assert b"".join(heard.token_bytes or ()).decode() == heard.content == EMOJI
    prompt = model.renderer.tokenizer.encode("look")
    completions = CompletionsClient(prompt)
    heard = ask(model.gateway, model.session([*ids, *parts]), completions, stream)
    assert heard.content == EMOJI + "\ufffd"
    assert completions.tokens[-4:] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x91", "<|im_end|>"]
    assert all(len(top) == 2 for top in completions.tops)  # no two tokens have one name


@pytest.mark.parametrize("named", [True, False])
def test_a_token_that_ends_an_answer_is_no_text(
    models: dict[str, Model], backends: Backends, named: bool
) -> None:
    """One that only generation_config.json names, and one that nothing names but the engine."""
    model = fresh(models, backends, "own-template")
    end = "<|endoftext|>" if named else "<tool_call>"
    prompt = model.renderer.tokenizer.encode("look")
    for client in (ChatClient(), MessagesClient(), ResponsesClient(), CompletionsClient(prompt)):
        for stream in (False, True):
            session = model.session(model.ids_of(b"forty two"), end)
            assert ask(model.gateway, session, client, stream).content == "forty two"
