"""A real engine started with `--skip-tokenizer-init` gets ids and sends ids; the gateway does the rest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.system.real_system import System, system_settings
from tests.support.waiting import wait_until
from weir.stack.stack import Stack

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def bare(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = system_settings(
        tmp_path_factory.mktemp("bare"), tiny_model, engine_args=["--skip-tokenizer-init"]
    )
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=1200)
        yield System(stack, settings)


def said(system: System, ticket: Any, **more: Any) -> tuple[str, str]:
    """The text of an answer, and why it ended. Without randomness, equal calls get equal answers."""
    reply = system.say(ticket, "tell me", temperature=0, max_tokens=64, **more)
    (choice,) = reply.choices
    return choice.message.content or "", choice.finish_reason


def test_its_answers_are_read_and_end_at_stop_strings(bare: System) -> None:
    ticket = bare.post("/sessions", {"train": False})
    whole, _ = said(bare, ticket)
    stop = whole[12:15]
    assert len(stop) == 3
    for _ in range(2):  # the first call finds out that the engine has no tokenizer
        cut, finish = said(bare, ticket, stop=[stop])
        assert (cut, finish) == (whole[: whole.index(stop)], "stop")
    messages: list[Any] = [{"role": "user", "content": "tell me"}]
    with bare.client(ticket) as client:
        chunks = list(
            client.chat.completions.create(
                model="policy", messages=messages, temperature=0, max_tokens=64, stop=[stop], stream=True
            )
        )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == cut
    turns = bare.get(f"/sessions/{ticket['session_id']}?tokens=true")["turns"]
    shortest = min(turns, key=lambda turn: len(turn["output_ids"]))
    longest = max(turns, key=lambda turn: len(turn["output_ids"]))
    length = len(shortest["output_ids"])
    assert shortest["output_ids"] == longest["output_ids"][:length], "the record ends with the stop string"
    assert len(shortest["logprobs"]) == length


def test_what_needs_its_tokenizer_is_refused_by_name(bare: System) -> None:
    ticket = bare.post("/sessions", {"train": False})
    with pytest.raises(openai.BadRequestError, match=r"structural_tag.* is not supported"):
        bare.say(ticket, "tell me", response_format={"type": "json_object"})


def test_its_answers_are_trained_and_it_takes_the_new_weights(bare: System) -> None:
    bare.train_one_group()
    wait_until(lambda: bare.serving() > 0, 300)
