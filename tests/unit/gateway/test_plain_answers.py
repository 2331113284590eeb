"""The fast parser reads plain answers as the family's full parser does, in every family."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.language.fast_parse import FastParser
from gateway.language.partial_parse import markup_of
from gateway.language.render import ChatRenderer, ParsedAnswer
from tests.support.gateway.examples import TEXTS
from tests.support.gateway.families_agent import renderer_of
from tests.support.gateway.families_models import CONTROL_TOKENS
from tests.support.hypothesis_profiles import examples

SPELLED = ('{"name": "f", "parameters": {}}', "<think>", "</think>", "thought\n", "<tool_call>", "[", " | ")
ANSWERS = st.lists(st.sampled_from([*TEXTS, *SPELLED]) | st.text(max_size=5), max_size=5).map("".join)


@pytest.fixture(scope="module", params=CONTROL_TOKENS)
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    directory: Path = tmp_path_factory.mktemp("family")
    return renderer_of(directory, request.param)


@settings(max_examples=examples(20), deadline=None)
@given(text=ANSWERS, ends=st.booleans())
def test_the_fast_parser_reads_what_the_full_parser_reads(
    renderer: ChatRenderer, text: str, ends: bool
) -> None:
    prompt = renderer.render([{"role": "user", "content": "hi"}], None)
    ids = renderer.tokenizer.encode(text) + ([renderer.stop_ids[0]] if ends else [])
    read = FastParser(renderer).read(ids, prompt)
    parsed = renderer.parse(ids, None, "t", prompt_ids=prompt)
    assert read is None or read == ParsedAnswer(parsed.content, parsed.reasoning or None, parsed.tool_calls)


def test_the_fast_parser_reads_plain_text(renderer: ChatRenderer) -> None:
    """If the prompt opens no thought, plain text needs no full parser."""
    prompt = renderer.render([{"role": "user", "content": "hi"}], None)
    ids = [*renderer.tokenizer.encode("It is sunny."), renderer.stop_ids[0]]
    opened = renderer.text_of(prompt).rstrip().endswith(("<think>", "<|channel>thought"))
    opened |= markup_of(renderer).late_calls  # in such a family, any text may turn out to be a call's name
    if not opened and renderer.parse(ids, None, "t", prompt_ids=prompt).content == "It is sunny.":
        assert FastParser(renderer).read(ids, prompt) == ParsedAnswer("It is sunny.")
