"""OpenAI's completions API over HTTP: prompts without a chat template."""

from typing import Any

from tests.support.gateway.running import RunningGateway


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
