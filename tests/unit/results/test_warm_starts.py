"""The rows of a warm start are the conversations as the gateway records them."""

from pathlib import Path

import pytest

from gateway.language.render import ChatRenderer
from results.experiments.errands import call, errand
from results.warm_starts import Conversation, row_of
from weir.demo.plan import write_student
from weir.demo.task import TOOL


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    directory = tmp_path_factory.mktemp("student")
    write_student(directory)
    return ChatRenderer(directory)


def said_in(renderer: ChatRenderer, conversation: Conversation) -> list[str]:
    """The texts that a row teaches, each up to its end token."""
    ids, mask = row_of(renderer, conversation)
    taught = renderer.tokenizer.decode([token for token, one in zip(ids, mask, strict=True) if one])
    return taught.split("<|im_end|>")


def test_a_row_teaches_what_the_model_says_and_nothing_else(renderer: ChatRenderer) -> None:
    conversation = Conversation(
        [[{"role": "user", "content": "one?"}], [{"role": "user", "content": "two?"}]], ["1", "2"]
    )
    assert said_in(renderer, conversation) == ["1", "2", ""]
    ids, _ = row_of(renderer, conversation)
    assert "two?" in renderer.tokenizer.decode(ids)


def test_a_row_of_an_errand_teaches_its_calls(renderer: ChatRenderer) -> None:
    conversation = errand("abcd", "abxd", (dict(TOOL),))
    assert said_in(renderer, conversation) == [*map(call, "abxd"), ""]


def test_a_row_is_what_the_whole_conversation_renders_to(tmp_path: Path) -> None:
    write_student(tmp_path)
    renderer = ChatRenderer(tmp_path)
    heard = [{"role": "user", "content": "one?"}], [{"role": "user", "content": "two?"}]
    ids, _ = row_of(renderer, Conversation(heard, ["1", "2"]))
    whole = [*heard[0], {"role": "assistant", "content": "1"}, *heard[1]]
    rendered = list(renderer.render(whole, None))
    assert ids[: len(rendered)] == rendered
