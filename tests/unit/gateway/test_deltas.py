"""The deltas of a stream add up to the answer, whatever is sampled and however the tokens are split."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import create_renderer
from renderers.parsing import parse_gpt_oss
from tokenizers import AddedToken, Tokenizer, decoders, models

from gateway.language import own_choice
from gateway.language.deltas import AnswerStream, Delta, RawTextStream, StoppedStream, before_stop
from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.partial_parse import FastParser, IncrementalDetokenizer, markup_of
from gateway.language.render import ChatRenderer
from gateway.language.tokenizer import BareTokenizer, TokenBytes
from gateway.language.tokenizer_files import tokenizer_of
from rollout_queue.contract.packed_tokens import TokenIds
from tests.support.gateway.examples import TEXTS
from tests.support.gateway.families_agent import Agent, as_sent_back, renderer_of, result, user
from tests.support.gateway.families_models import CONTROL_TOKENS, make_model
from tests.support.gateway.own_templates import THOUGHTFUL
from tests.support.hypothesis_profiles import examples

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
PARAMETERS = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
KIMI_TEXT = KIMI.replace("tool_calls_section", "tool_call_section")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"  # noqa: RUF001
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'  # noqa: RUF001
)
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">1'  # noqa: RUF001
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"  # noqa: RUF001
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
HY3 = (
    "<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value></tool_call></tool_calls>"
).replace(">", ":opensource>")
THOUGHT = "<think>\nhm\n</think>\n\n"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
HARMONY_CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)
SAYINGS: dict[str, tuple[str, ...]] = {
    "qwen3": (THOUGHT, HERMES),
    "qwen3.5": (THOUGHT, PARAMETERS),
    "prime-qwen3": (THOUGHT, HERMES, PARAMETERS),
    "glm-4.5": (THOUGHT, GLM),
    "glm-5": (THOUGHT, GLM),
    "kimi-k2": (THOUGHT, KIMI_TEXT, KIMI),
    "kimi-k2.5": (THOUGHT, KIMI_TEXT, KIMI),
    "minimax-m2": (THOUGHT, MINIMAX),
    "deepseek-v3": (THOUGHT, DEEPSEEK),
    "deepseek-r1": (THOUGHT, DEEPSEEK),
    "deepseek-v4": (THOUGHT, DSML),
    "nemotron-3": (THOUGHT, PARAMETERS),
    "llama-3": ('{"name": "f", "parameters": {"a": 1}}',),
    "gemma4": ("<|channel>thought\nhm\n<channel|>", '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'),
    "hy3": (THOUGHT.replace(">", ":opensource>"), HY3),
    "inkling": (
        "<|content_thinking|>hm<|end_message|>",
        "<|message_model|><|content_text|>Hi <|end_message|>",
        '<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {"a": 1}}<|end_message|>',
    ),
    "laguna-xs.2": (THOUGHT, GLM),
    "laguna-xs-2.1": (THOUGHT, GLM),
    "own-template": (THOUGHT, HERMES),
    "gpt-oss": (
        "<|start|>assistant<|channel|>analysis<|message|>hm <|end|>",
        "<|start|>assistant<|channel|>final<|message|>Hi ",
        HARMONY_CALL,
    ),
}
"""Answers of each family, with thoughts and calls in its own format."""


def harmony(directory: Path) -> ChatRenderer:
    """gpt-oss: the library's own parser with a small vocabulary, because the real one must be downloaded."""
    make_model(directory, "qwen3")
    tokenizer = tokenizer_of(directory)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in HARMONY])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = BareTokenizer(directory, None)
    start, channel, message, end, return_, call, constrain = (tokens.encode(t)[0] for t in HARMONY)

    class GptOss:
        """Another model's renderer with gpt-oss' parser."""

        def __init__(self, *given: Any) -> None:
            self.inner = create_renderer(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def get_stop_token_ids(self) -> list[int]:
            return [return_, call]

        def parse_response(self, token_ids: list[int], **_: Any) -> Any:
            return parse_gpt_oss(
                tokens,
                token_ids,
                return_id=return_,
                call_id=call,
                start_id=start,
                end_id=end,
                channel_id=channel,
                message_id=message,
                constrain_id=constrain,
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_choice, "create_renderer", GptOss)
        return ChatRenderer(directory, "qwen3")


@pytest.fixture(scope="module", params=sorted(SAYINGS))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ChatRenderer]:
    directory = tmp_path_factory.mktemp("family") / "model"
    if request.param == "gpt-oss":
        return request.param, harmony(directory)
    if request.param == "own-template":
        return request.param, ChatRenderer(THOUGHTFUL.make(directory))
    return request.param, ChatRenderer(make_model(directory, request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer(make_model(tmp_path_factory.mktemp("qwen") / "model", "qwen3"), "qwen3")


def told(deltas: Sequence[Delta]) -> ParsedAnswer:
    """The answer that a client joins from the deltas."""
    calls = [delta for delta in deltas if delta.tool_call is not None]
    assert [delta.index for delta in calls] == list(range(len(calls)))
    return ParsedAnswer(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(delta.tool_call for delta in calls if delta.tool_call is not None),
    )


def plain(answer: ParsedAnswer) -> ParsedAnswer:
    """The answer without the white space around its texts, because only some families strip it."""
    return ParsedAnswer(answer.content.strip(), (answer.reasoning or "").strip(), answer.tool_calls)


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Split the ids into pieces whose sizes are `cuts`, over and over."""
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        pieces.append(ids[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


CUTS = st.lists(st.integers(1, 9) | st.just(64), min_size=1, max_size=4)
TAKES_BACK = ("<|end_header_id|>", "<|channel>", "<channel|>", "<|content_thinking|>")
"""At these tokens, parsers drop the text before them or turn it into a thought; some do so only if the answer
ends there. A stream cannot take back text, so the tests put these tokens only at the start of an answer."""


def answers(renderer: ChatRenderer, sayings: Sequence[str]) -> st.SearchStrategy[list[int]]:
    """Ids of thoughts, calls and text in any order, whole or cut, with misplaced tokens and single bytes."""
    encode, backend = renderer.tokenizer.encode, renderer.tokenizer.backend
    late = [text for text in sayings if not any(token in text for token in TAKES_BACK)] or [""]
    never = {backend.token_to_id(token) for token in TAKES_BACK} | set(renderer.stop_ids)
    strange = sorted(renderer.tokenizer.added_ids - never) + [i for text in ("👩", "é") for i in encode(text)]

    def said(sayings: Sequence[str]) -> st.SearchStrategy[list[int]]:
        whole = st.sampled_from([encode(text) for text in sayings])
        return whole | st.tuples(whole, st.integers(1, 40)).map(lambda part: part[0][: part[1]])

    text = st.sampled_from([encode(text) for text in TEXTS])
    tokens = st.lists(st.sampled_from(strange), max_size=2)
    pieces = st.tuples(st.just([]) | said(sayings), st.lists(said(late) | text | text | tokens, max_size=9))
    return pieces.map(lambda both: [token for piece in [both[0], *both[1]] for token in piece])


@pytest.mark.hypothesis
def test_the_deltas_add_up_to_the_answer(family: tuple[str, ChatRenderer]) -> None:
    name, renderer = family

    hi = [{"role": "user", "content": "hi"}]
    prompts = [None] if name == "gpt-oss" else [None, renderer.render(hi, None)]  # some open a thought

    @settings(max_examples=examples(70), deadline=None)
    @given(answers(renderer, SAYINGS[name]), CUTS, st.sampled_from(prompts))
    def holds(ids: list[int], cuts: list[int], prompt: TokenIds | None) -> None:
        answer = renderer.parse(ids, None, "t", prompt_ids=prompt)
        stream = AnswerStream(renderer, None, "t", prompt)
        deltas = [delta for piece in cut(ids, cuts) for delta in stream.feed(piece)]
        assert plain(told(deltas + stream.finish(answer))) == plain(answer), renderer.text_of(ids)

    holds()


SKIPPED = frozenset({"gpt-oss", "deepseek-v4"})
"""gpt-oss' template here is another family's. DeepSeek-V4's does not go on after two sections of calls."""


@pytest.mark.hypothesis
def test_an_answer_that_is_sent_back_extends_its_row(family: tuple[str, ChatRenderer]) -> None:
    """Unless the template drops its thought."""
    name, renderer = family
    ends = st.sampled_from([[], *([end] for end in renderer.stop_ids)])
    ids = st.integers(0, renderer.tokenizer.vocabulary_size - 1).filter(lambda i: i not in renderer.stop_ids)
    sampled = answers(renderer, SAYINGS[name]) | st.lists(ids, max_size=9)

    @settings(max_examples=examples(70), deadline=None)
    @given(sampled, ends, st.booleans(), st.booleans())
    def holds(ids: list[int], end: list[int], keeps: bool, reasoning: bool) -> None:
        own = renderer.variant(renderer.retention("all")) if keeps else renderer
        agent = Agent(own, messages=[user("go")])
        _, read = agent.answer(agent.ask(), [*ids, *end])
        agent.messages.append(as_sent_back(read, reasoning))
        results = [result("ok", call.call_id) for call in read.tool_calls]
        relation = agent.ask(*(results or [user("go on")])).relation
        dropped = read.reasoning and not keeps and (not results or name == "deepseek-r1")
        assert relation == "extends" or (dropped and relation == "rerendered")

    if name not in SKIPPED:
        holds()


STOPS = (
    "STOP",
    "lo wor",
    "\n\n H",
    "<",
    "日本語 👩",
    "OPS",
    "d\n",
    "m\n</think>\n\nH",
    ">\n\nH",
    '"f", "a',
    "hm",
)
"""Some lie in a thought or in a call, and some across its marks."""


@pytest.mark.hypothesis
def test_nothing_is_told_from_a_stop_string_on(qwen: ChatRenderer) -> None:
    nearly = ("S", "ST", "OP", "TOP", "Hello", " world", "\n", "\n\n", " H", "日本語 ", "👩")
    talk = st.lists(st.sampled_from(nearly), max_size=8).map(
        lambda said: qwen.tokenizer.encode("".join(said))
    )

    @settings(max_examples=examples(400), deadline=None)
    @given(
        talk | answers(qwen, SAYINGS["qwen3"]),
        CUTS,
        st.lists(
            st.sampled_from(STOPS),
            min_size=1,
            max_size=3,
        ),
    )
    def holds(ids: list[int], cuts: list[int], stop: list[str]) -> None:
        ids, matched = stopped(qwen, ids, stop)
        before = ids if matched is None else before_stop(qwen.tokenizer, ids, matched)
        text = qwen.text_of(ids)
        assert qwen.text_of(before) == (text if matched is None else text.partition(matched)[0])
        answer = qwen.parse(before, None, "t")
        stream = StoppedStream(AnswerStream(qwen, None, "t"), qwen.tokenizer, stop)
        deltas = [delta for piece in cut(ids, cuts) for delta in stream.feed(piece)]
        assert plain(told(deltas + stream.finish(answer))) == plain(answer)

    holds()


def stopped(renderer: ChatRenderer, ids: list[int], stop: list[str]) -> tuple[list[int], str | None]:
    """The ids up to the token that completes a stop string, and that string.

    As in an engine, the text is checked after each token.
    """
    for end in range(1, len(ids) + 1):
        text = renderer.text_of(ids[:end])
        found = [each for each in stop if each in text]
        if found:
            return ids[:end], found[0]
    return ids, None


def test_text_is_told_as_it_comes(family: tuple[str, ChatRenderer]) -> None:
    name, renderer = family
    thought = "" if name == "llama-3" else SAYINGS[name][0]
    opening = {"gpt-oss": "<|start|>assistant<|channel|>final<|message|>"}
    opening["inkling"] = "<|message_model|><|content_text|>"
    words = "The answer is 42 and more of it."
    ids = renderer.tokenizer.encode(thought + opening.get(name, "") + words)
    early = told(fed(AnswerStream(renderer, None, "t"), ids))
    assert (early.content, early.reasoning) == (words, "hm" if thought else "")


def test_a_call_is_told_when_it_is_whole(family: tuple[str, ChatRenderer]) -> None:
    name, renderer = family
    # In these families, the end of the answer decides whether it is a call.
    if name in ("llama-3", "gpt-oss", "deepseek-v4"):
        return
    thought, *_, call = SAYINGS[name]
    ids = renderer.tokenizer.encode(thought + call)
    answer = renderer.parse(ids, None, "t")
    assert len(answer.tool_calls) == 1
    assert told(fed(AnswerStream(renderer, None, "t"), ids)).tool_calls == answer.tool_calls


def fed(stream: AnswerStream, ids: list[int]) -> list[Delta]:
    """The deltas before the end of the answer, when tokens come one by one."""
    return [delta for token in ids for delta in stream.feed([token])]


def test_an_object_that_may_be_a_call_waits_for_the_end(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    llama = ChatRenderer(make_model(tmp_path_factory.mktemp("llama") / "model", "llama-3"), "llama-3")
    for text, calls in (('{"name": "f", "parameters": {}}', 1), ('{"answer": 42}', 0)):
        ids = llama.tokenizer.encode(text)
        stream = AnswerStream(llama, None, "t")
        assert stream.feed(ids) == []
        end = told(stream.finish(llama.parse(ids, None, "t")))
        assert (len(end.tool_calls), end.content) == (calls, "" if calls else text)


def test_a_broken_call_ends_as_the_text_that_it_is(qwen: ChatRenderer) -> None:
    """With its markers, so that the agent sends back what was sampled."""
    broken, cut_short = "Look: <tool_call>\n{broken\n</tool_call>", " and <tool_call>\n{open"
    ids = qwen.tokenizer.encode(broken + cut_short)
    stream = AnswerStream(qwen, None, "t")
    early = told(fed(stream, ids))
    assert early == ParsedAnswer(broken + " and", "")
    late = told(stream.finish(qwen.parse(ids, None, "t")))
    assert late == ParsedAnswer(" <tool_call>\n{open", "")


@pytest.mark.parametrize("tokens", [64, 2048])
def test_parses_are_as_many_as_control_tokens(
    qwen: ChatRenderer, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    parses = 0
    parse = qwen.parse

    def counted(*given: Any, **more: Any) -> ParsedAnswer:
        nonlocal parses
        parses += 1
        return parse(*given, **more)

    monkeypatch.setattr(qwen, "parse", counted)
    words = qwen.tokenizer.encode("a < b and so on ") * tokens
    encode = qwen.tokenizer.encode
    ids = encode("<think>") + words[:tokens] + encode("</think>") + words[:tokens] + encode(HERMES)
    stream = AnswerStream(qwen, None, "t")
    parses = 0
    early = told(fed(stream, ids))
    assert len(early.tool_calls) == 1
    assert parses <= 2 * (1 + 4)  # the start, and four control tokens


def byte_fallback() -> Tokenizer:
    """A tokenizer like SentencePiece: words include the space before them, and unknown text becomes bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("<unk>", "▁", "a", "b", "▁a", "é", "▁b", "<", "\ufffd"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_pieces_decode_as_the_whole(qwen: ChatRenderer, kind: str) -> None:
    backend = byte_fallback() if kind == "byte-fallback" else qwen.tokenizer.backend
    byte_ids = frozenset(range(256)) if kind == "byte-fallback" else frozenset()
    emoji = [ids for text in ("👩‍👩‍👧", "é", " b a", "日本") if (ids := backend.encode(text).ids)]
    some = st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=6)
    pieces = st.lists(some | st.sampled_from(emoji), max_size=8)

    @settings(max_examples=examples(300), deadline=None)
    @given(pieces, CUTS)
    def holds(pieces: list[list[int]], cuts: list[int]) -> None:
        ids = [token for piece in pieces for token in piece]
        decoder = IncrementalDetokenizer(backend, byte_ids)
        text = "".join(decoder.step(piece) for piece in cut(ids, cuts))
        whole = backend.decode(ids, skip_special_tokens=False)
        assert whole.startswith(text)
        # The decoder may hold back an incomplete last character, or the last run of byte tokens.
        assert whole[len(text) :].strip("\ufffd") == "" or (ids and ids[-1] in byte_ids)
        end = backend.encode("a").ids
        assert text + decoder.step(end) == backend.decode(ids + end, skip_special_tokens=False)

    holds()


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
def test_the_bytes_of_tokens_are_what_the_decoder_makes_of_them(qwen: ChatRenderer, kind: str) -> None:
    backend = qwen.tokenizer.backend if kind == "byte-level" else byte_fallback()
    if kind == "metaspace":
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_tokens([AddedToken(text, special=False) for text in ("é", "\n\n", "<added>")])
    of = TokenBytes(backend)
    any_ids = st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=9)

    @settings(max_examples=examples(300), deadline=None)
    @given(st.text(max_size=9) | st.sampled_from(["👩‍👩‍👧", " b a", "日本<added>é"]), any_ids)
    def holds(text: str, ids: list[int]) -> None:
        written = backend.encode(text).ids
        joined = b"".join(map(of.of, written)).decode(errors="replace")
        assert joined.strip() == backend.decode(written, False).strip()
        if kind == "byte-level":  # other decoders have a rule of their own for bytes that are no text
            joined = b"".join(map(of.of, ids)).decode(errors="replace")
            assert joined == backend.decode(ids, skip_special_tokens=False)
        assert b"".join(map(of.of, of.ids_of(text) or ())) == text.encode()

    holds()


@pytest.mark.hypothesis
def test_text_without_a_template_is_told_as_it_is(qwen: ChatRenderer) -> None:
    @settings(max_examples=examples(300), deadline=None)
    @given(answers(qwen, SAYINGS["qwen3"]), CUTS, st.booleans())
    def holds(ids: list[int], cuts: list[int], ended: bool) -> None:
        answer = ParsedAnswer(qwen.text_of(ids))
        stream = RawTextStream(qwen)
        sampled = ids + qwen.stop_ids[:1] if ended else ids
        deltas = [delta for piece in cut(sampled, cuts) for delta in stream.feed(piece)]
        assert told(deltas + stream.finish(answer)).content == answer.content

    holds()


# The fast parser reads plain answers as the full parser of each family does


SPELLED = ('{"name": "f", "parameters": {}}', "<think>", "</think>", "thought\n", "<tool_call>", "[", " | ")
PLAIN = st.lists(st.sampled_from([*TEXTS, *SPELLED]) | st.text(max_size=5), max_size=5).map("".join)


@pytest.fixture(scope="module", params=CONTROL_TOKENS)
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    directory: Path = tmp_path_factory.mktemp("family")
    return renderer_of(directory, request.param)


@settings(max_examples=examples(20), deadline=None)
@given(text=PLAIN, ends=st.booleans())
def test_the_fast_parser_reads_what_the_full_parser_reads(own: ChatRenderer, text: str, ends: bool) -> None:
    prompt = own.render([{"role": "user", "content": "hi"}], None)
    ids = own.tokenizer.encode(text) + ([own.stop_ids[0]] if ends else [])
    read = FastParser(own).read(ids, prompt)
    parsed = own.parse(ids, None, "t", prompt_ids=prompt)
    assert read is None or read == ParsedAnswer(parsed.content, parsed.reasoning or None, parsed.tool_calls)


def test_the_fast_parser_reads_plain_text(own: ChatRenderer) -> None:
    """If the prompt opens no thought, plain text needs no full parser."""
    prompt = own.render([{"role": "user", "content": "hi"}], None)
    ids = [*own.tokenizer.encode("It is sunny."), own.stop_ids[0]]
    opened = own.text_of(prompt).rstrip().endswith(("<think>", "<|channel>thought"))
    opened |= markup_of(own).late_calls  # in such a family, any text may turn out to be a call's name
    if not opened and own.parse(ids, None, "t", prompt_ids=prompt).content == "It is sunny.":
        assert FastParser(own).read(ids, prompt) == ParsedAnswer("It is sunny.")
