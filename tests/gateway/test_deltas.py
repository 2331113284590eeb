"""What a streaming client puts together is the answer, whatever the model says and however it is cut."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.deltas import AnswerStream
from gateway.render import ChatRenderer


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(tiny_model)


def test_the_deltas_add_up_to_the_answer(renderer: ChatRenderer) -> None:
    size = renderer.config.vocab_size
    stops = set(renderer.stop_ids)  # where an engine ends
    control = sorted(renderer.tokenizer.added_ids - stops)
    pieces = st.lists(
        st.lists(
            st.integers(0, size - 1).filter(lambda i: i not in stops) | st.sampled_from(control),
            min_size=1,
            max_size=4,
        ),
        max_size=12,
    )

    @settings(max_examples=200, deadline=None)
    @given(pieces)
    def holds(pieces: list[list[int]]) -> None:
        stream = AnswerStream(renderer, None, "t", [])
        ids = [token for piece in pieces for token in piece]
        answer = renderer.parse(ids, None, "t")
        deltas = [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish(answer)
        assert "".join(delta.content for delta in deltas) == answer.content
        assert "".join(delta.reasoning for delta in deltas).strip() == (answer.reasoning or "").strip()
        assert tuple(delta.tool_call for delta in deltas if delta.tool_call is not None) == answer.tool_calls

    holds()
