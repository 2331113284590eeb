"""OpenAI's completions API over HTTP: prompts without a chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from gateway.language.tokenizer_files import tokenizer_of
from tests.support.gateway.running import Backends, RunningGateway


def test_a_text_prompt_is_continued_without_a_chat_template(gateway: RunningGateway) -> None:
    session = gateway.session()
    gateway.engine.script.append(" upon a time")
    reply = gateway.client(session).completions.create(model="policy", prompt="Once", max_tokens=20)
    assert reply.choices[0].text == " upon a time"
    assert reply.choices[0].finish_reason == "stop"
    (turn,) = gateway.turns(session)
    assert turn["context_ids"] == gateway.engine.tokenizer.encode("Once").ids
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == turn["context_len"]


def test_ids_are_continued_as_they_are_and_extend_the_turn_that_they_begin_with(
    gateway: RunningGateway,
) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/completions"
    first = gateway.post(path, {"prompt": [5, 6, 7], "return_token_ids": True}).json()
    sampled = first["choices"][0]["token_ids"]
    gateway.post(path, {"prompt": [5, 6, 7, *sampled, 8, 9]})
    gateway.post(path, {"prompt": [5, 6]})
    one, two, three = gateway.turns(session)
    assert one["context_ids"] == [5, 6, 7]
    assert (two["relation"], two["parent_id"], two["context_ids"]) == ("extends", one["turn_id"], [8, 9])
    assert (three["relation"], three["parent_id"]) == ("forks", None)


def test_several_prompts_have_several_answers_in_order(gateway: RunningGateway) -> None:
    session = gateway.session()
    gateway.engine.script += ["a", "b", "c", "d"]
    reply = gateway.client(session).completions.create(model="p", prompt=["x", "y"], n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert sorted(choice.text for choice in reply.choices) == ["a", "b", "c", "d"]
    turns = {tuple(turn["context_ids"]) for turn in gateway.turns(session)}
    assert turns == {tuple(gateway.engine.tokenizer.encode(text).ids) for text in ("x", "y")}


def test_a_stream_adds_up_to_the_plain_text(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.session())
    for answer in ("  spaces stay  ", "<think>no tags here</think>", "ends\n\n", "漢字 🙂 ok"):
        gateway.engine.script += [answer, answer]
        plain = client.completions.create(model="p", prompt="go", echo=True).choices[0].text
        chunks = list(client.completions.create(model="p", prompt="go", echo=True, stream=True))
        assert plain == "go" + answer
        assert "".join(chunk.choices[0].text for chunk in chunks) == plain
        assert chunks[-1].choices[0].finish_reason == "stop", answer


def test_logprobs_are_those_of_the_record(gateway: RunningGateway) -> None:
    session = gateway.session()
    reply = gateway.client(session).completions.create(model="p", prompt="go", logprobs=1)
    logprobs = reply.choices[0].logprobs
    (turn,) = gateway.turns(session)
    assert logprobs is not None
    assert logprobs.token_logprobs == turn["logprobs"]
    assert logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs) == len(logprobs.tokens or []) == turn["output_len"]
    assert (logprobs.text_offset or [])[0] == 0


ENDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"max_tokens": 3}, None, "length"),
    ({"stop": "END"}, "one, two ", "stop"),
]


def test_an_answer_ends_where_it_was_asked_to(gateway: RunningGateway) -> None:
    for more, text, reason in ENDS:
        gateway.engine.script.append("one, two END three")
        reply = gateway.post("/v1/completions", {"prompt": "count", **more}).json()
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == reason, more
        assert choice["text"] == text if text else reply["usage"]["completion_tokens"] == 3, more


BEGIN = "<|endoftext|>"


@pytest.mark.parametrize("said_by", ["the post-processor", "add_bos_token", "nothing"])
def test_a_text_prompt_has_the_models_begin_token_once(
    backends: Backends, tmp_path: Path, said_by: str
) -> None:
    backends.clear(None)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(backends.model_path / name, tmp_path)
    tokenizer, begin = tokenizer_of(backends.model_path), backends.tokenizer.token_to_id(BEGIN)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    if said_by == "the post-processor":
        tokenizer.post_processor = TemplateProcessing(f"{BEGIN} $A", f"{BEGIN} $A $B", [(BEGIN, begin)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"bos_token": BEGIN}
    file.write_text(json.dumps(config | {"add_bos_token": said_by == "add_bos_token"}), encoding="utf-8")
    text, frame = "Once upon a time, or twice", [] if said_by == "nothing" else [begin]
    ids = backends.tokenizer.encode(text).ids
    with backends.ready_gateway(model_path=tmp_path) as gateway:

        def asked(prompt: Any, **more: Any) -> Any:
            reply = gateway.post("/v1/completions", {"prompt": prompt, "echo": True, "max_tokens": 4, **more})
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["text"].startswith(prompt if isinstance(prompt, str) else text)
            return gateway.engine.requests[-1]["input_ids"]

        assert asked(text) == frame + ids
        assert asked(text, add_special_tokens=False) == ids
        assert asked(BEGIN + text) == [begin, *ids], "never twice"
        assert asked(ids) == ids, "ids are taken as they are"
        assert gateway.chat(text).status_code == 200
        assert len(gateway.engine.requests[-1]["input_ids"]) > len(ids), "neither cut nor filled"
