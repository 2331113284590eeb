"""Models without a family in the library: the gateway renders their own template, and no token drifts."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gateway.language import own_template, template_sandbox
from gateway.language.tokenizer_files import tokenizer_of
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.own_templates import (
    BASE,
    CHATML,
    HERMES_CALL,
    LOOP,
    MODELS,
    PUBLIC,
    THOUGHTFUL,
    OwnModel,
)
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.redis_clients import redis_at
from tests.support.serving import serving
from tests.support.waiting import wait_until

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Looks a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


@dataclass
class Stand:
    """A gateway for one model, and the same template in `transformers`."""

    name: str
    model: OwnModel
    gateway: RunningGateway
    reference: Any

    def text(self, history: list[dict[str, Any]], tools: Any) -> str:
        """The prompt for a history as `transformers` writes it."""
        read = [dict(message) for message in history]
        for message in read:
            for call in message.get("tool_calls") or ():
                call["function"] = {
                    "name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                }
        written: str = self.reference.apply_chat_template(
            json.loads(json.dumps(read)), tools=tools, tokenize=False, add_generation_prompt=True
        )
        return written


@contextmanager
def running(model: OwnModel, directory: Path, redis_url: str, **settings: Any) -> Iterator[RunningGateway]:
    """A gateway for the model, on a Redis and an engine of its own."""
    model.make(directory)
    tokenizer = tokenizer_of(directory)
    own = redis_url.removesuffix("0") + "5"
    backends = Backends(own, directory, tokenizer, redis_at(own), FakeEngine(tokenizer, end=model.end))
    with serving(backends) as backends.engine_url, backends.gateway(**settings) as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        yield gateway
    backends.redis.close()


@pytest.fixture(scope="module", params=sorted(MODELS))
def stand(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stand]:
    from transformers import PreTrainedTokenizerFast

    model = MODELS[request.param]
    directory = tmp_path_factory.mktemp("own") / request.param
    with running(model, directory, redis_url) as gateway:
        reference = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            chat_template=model.template,
            **json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")),
        )
        yield Stand(request.param, model, gateway, reference)


def test_a_conversation_of_several_turns_does_not_drift(stand: Stand) -> None:
    gateway, tokenizer, engine = stand.gateway, stand.gateway.engine.tokenizer, stand.gateway.engine
    session = gateway.session()
    tools = [TOOL] if stand.model.tools else None
    answers = [
        "It is here.",
        *([f"Let me see.{stand.model.call}"] if stand.model.call else []),
        "So it is 7 \u00e9.",
    ]
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"where {stand.model.end} is it?"},
    ]
    sampled_before: list[int] = []
    for answer in answers:
        # One token for each character: not the ids that the tokenizer gives for the whole text.
        ids = [each for character in answer for each in tokenizer.encode(character).ids]
        if stand.model.call and stand.model.call in answer:
            ids = tokenizer.encode(answer).ids
        engine.script.append(ids)
        body = {"messages": history, **({"tools": tools} if tools else {})}
        reply = gateway.call("POST", f"/sessions/{session['session_id']}/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        prompt = engine.requests[-1]["input_ids"]
        assert tokenizer.decode(prompt, skip_special_tokens=False) == stand.text(history, tools)
        turn = gateway.turns(session)[-1]
        assert turn["output_ids"] == [*ids, tokenizer.token_to_id(stand.model.end)]
        if turn["relation"] == "extends":
            assert prompt[: len(sampled_before)] == sampled_before
        elif turn["relation"] != "root":
            assert turn["relation"] == "rerendered", turn
            assert stand.model.rewrites_tools
        sampled_before = [*prompt, *turn["output_ids"]]
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == answer.removesuffix(stand.model.call or "\0")
        said = {"role": "assistant", "content": message["content"]}
        if message.get("tool_calls"):
            call = message["tool_calls"][0]
            assert call["function"] == {"name": "get", "arguments": '{"key": "a"}'}
            history += [
                {**said, "tool_calls": message["tool_calls"]},
                {"role": "tool", "tool_call_id": call["id"], "content": "7"},
            ]
        else:
            assert stand.model.call is None or stand.model.call not in answer
            history += [said, {"role": "user", "content": "and then?"}]
    relations = [turn["relation"] for turn in gateway.turns(session)]
    assert relations[0] == "root"
    assert set(relations[1:]) == {"rerendered" if stand.model.rewrites_tools else "extends"}


def test_a_streamed_answer_equals_the_plain_one(stand: Stand) -> None:
    gateway = stand.gateway
    answer = "Let me see \u2014 all of it." + (stand.model.call or ' {"name": 1}')
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "look"}]}
    if stand.model.tools:
        body["tools"] = [TOOL]
    gateway.engine.script.extend([answer, answer])
    plain = gateway.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    streamed, calls = "", list[Any]()
    for line in gateway.post("/v1/chat/completions", body | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                streamed += choice["delta"].get("content") or ""
                calls += choice["delta"].get("tool_calls") or []
    assert streamed == plain["content"]
    assert [call["function"] for call in calls] == [
        call["function"] for call in plain.get("tool_calls") or []
    ]
    assert bool(calls) == (stand.model.call is not None)


def test_the_status_says_what_the_template_does(stand: Stand) -> None:
    words = stand.gateway.get("/admin/status", key=ADMIN_KEY).json()["renderer"]
    assert "the model's own" in words
    if not stand.model.tools:
        assert "it writes no tools" in words
    elif stand.model.call is None:
        assert "no parser reads its tool calls" in words
    else:
        assert "read like those of qwen3" in words
    assert ("chat and tools" in words) == (stand.model.tools and not stand.model.rewrites_tools)


def test_what_the_template_cannot_do_is_refused_by_name(stand: Stand) -> None:
    hello = {"role": "user", "content": "hi"}
    wishes: list[tuple[dict[str, Any], str]] = []
    if not stand.model.tools:
        wishes += [({"messages": [hello], "tools": [TOOL]}, "tools")]
        reply = stand.gateway.post("/v1/chat/completions", wishes[0][0])
        assert "gateway.tool_prompt: hermes" in reply.json()["error"]["message"]
    elif stand.model.call is None:
        wishes += [({"messages": [hello], "tools": [TOOL], "tool_choice": "required"}, "tool_choice")]
    for body, param in wishes:
        reply = stand.gateway.post("/v1/chat/completions", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize("stand", ["gemma3", "mistral"], indirect=True)
def test_neighbours_of_one_role_are_joined_for_a_template_that_refuses_them(stand: Stand) -> None:
    one, two = ({"role": "user", "content": text} for text in ("one", "two"))
    late = {"role": "system", "content": "now"}
    said = {"role": "assistant", "content": "yes"}
    joined = {"role": "user", "content": "one\n\ntwo"}
    for messages, read in (
        ([one, two], [joined]),
        ([one, two, said, late, two], [joined, said, {"role": "user", "content": "now\n\ntwo"}]),
    ):
        assert stand.gateway.post("/v1/chat/completions", {"messages": messages}).status_code == 200
        prompt = stand.gateway.engine.requests[-1]["input_ids"]
        assert stand.gateway.engine.tokenizer.decode(prompt, False) == stand.text(read, None)


@pytest.mark.parametrize("stand", sorted(name for name in MODELS if MODELS[name].tools), indirect=True)
def test_any_ids_of_calls_are_rendered(stand: Stand) -> None:
    function = {"name": "get", "arguments": "no JSON"}
    call = {"id": "call_of_any_length", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "seen"},
    ]
    engine = stand.gateway.engine
    reply = stand.gateway.post("/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
    assert reply.status_code == 200, reply.text
    prompt = engine.tokenizer.decode(engine.requests[-1]["input_ids"], skip_special_tokens=False)
    assert "no JSON" in prompt
    assert "seen" in prompt


def test_thoughts_are_kept_for_a_result_and_dropped_for_a_user_unless_the_session_keeps_all(
    redis_url: str, tmp_path: Path
) -> None:
    with running(THOUGHTFUL, tmp_path, redis_url) as gateway:
        for thinking in (None, "all"):
            check_kept_thoughts(gateway, thinking)


def check_kept_thoughts(gateway: RunningGateway, thinking: str | None) -> None:
    tokenizer, session = gateway.engine.tokenizer, gateway.session(thinking=thinking)
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    history: list[dict[str, Any]] = [{"role": "user", "content": "where?"}]
    prompts = []
    for answer in (
        f"<think>\nlet me look\n</think>\n\nSo.{THOUGHTFUL.call}",
        "<think>\nso\n</think>\n\nThere.",
        "Yes.",
    ):
        gateway.engine.script.append(answer)
        reply = gateway.post(path, {"messages": history, "tools": [TOOL]})
        assert reply.status_code == 200, reply.text
        prompts.append(tokenizer.decode(gateway.engine.requests[-1]["input_ids"], skip_special_tokens=False))
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == answer.partition("\n\n")[2].partition("\n")[0] or answer == "Yes."
        assert ("reasoning_content" in message) == ("<think>" in answer)
        history.append({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)})
        if message.get("tool_calls"):
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
        history.append(result if message.get("tool_calls") else {"role": "user", "content": "really?"})
    assert "let me look" in prompts[1]
    assert ("let me look" in prompts[2]) == (thinking == "all")
    assert "There." in prompts[2]
    last = "extends" if thinking == "all" else "rerendered"
    assert [turn["relation"] for turn in gateway.turns(session)] == ["root", "extends", last]


def test_thinking_of_an_own_template_is_turned_off_by_its_own_option(redis_url: str, tmp_path: Path) -> None:
    with running(THOUGHTFUL, tmp_path, redis_url) as gateway:
        asked = []
        settings: list[dict[str, Any]] = [{"reasoning_effort": "none"}, {"reasoning_effort": "high"}, {}]
        for more in settings:
            assert gateway.chat("hi", **more).status_code == 200
            asked.append(gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"], False))
        assert asked[0] == asked[2] + "<think>\n\n</think>\n\n"
        assert asked[1] == asked[2]


TOKENS_OF_CALLS = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize(
    "model",
    [MODELS["gemma3"], PUBLIC["gemma2"], PUBLIC["zephyr"], replace(MODELS["phi4"], ordinary=TOKENS_OF_CALLS)],
    ids=["gemma3", "gemma2", "zephyr", "with tokens for calls"],
)
def test_a_tool_prompt_gives_tools_to_a_model_whose_template_writes_none(
    model: OwnModel, redis_url: str, tmp_path: Path
) -> None:
    with running(model, tmp_path, redis_url, tool_prompt="hermes") as gateway:
        words = gateway.get("/admin/status", key=ADMIN_KEY).json()["renderer"]
        assert "its tool calls are read like those of qwen3" in words
        session, engine = gateway.session(), gateway.engine
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        history: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "where?"},
        ]
        for answer in (f"Let me see.{HERMES_CALL}", HERMES_CALL * 2, "There it is."):
            engine.script.append(engine.tokenizer.encode(answer).ids)
            reply = gateway.post(path, {"messages": history, "tools": [TOOL]})
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            calls = choice["message"].get("tool_calls") or []
            assert [call["function"] for call in calls] == [
                {"name": "get", "arguments": '{"key": "a"}'}
            ] * answer.count("<tool_call>")
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            assert (choice["message"]["content"] or "") == answer.partition("\n")[0]
            history.append(choice["message"])
            history += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"seen {number}"}
                for number, call in enumerate(calls)
            ] or [{"role": "user", "content": "thanks"}]
        prompt = engine.tokenizer.decode(engine.requests[-1]["input_ids"], False)
        assert json.dumps(TOOL) in prompt.partition("where?")[0], "the system prompt, or the first message"
        assert '"name": "get", "arguments": {"key": "a"}}\n</tool_call>' in prompt
        assert "<tool_response>\nseen 0\n</tool_response>\n<tool_response>\nseen 1\n" in prompt
        relations = [turn["relation"] for turn in gateway.turns(session)]
        assert relations == ["root", "extends", "extends"]


BROKEN = ('I see <tool_call>\n{"name": "get", "arg', "<tool_call> is a tag, </tool_call> too", "<tool_call")


@pytest.mark.parametrize("said", [f"Let me see. {HERMES_CALL}{HERMES_CALL}", "no < tool", *BROKEN])
def test_calls_of_a_tool_prompt_are_streamed_as_they_are_read(
    said: str, redis_url: str, tmp_path: Path
) -> None:
    with running(PUBLIC["zephyr"], tmp_path, redis_url, tool_prompt="hermes") as gateway:
        body = {"messages": [{"role": "user", "content": "look"}], "tools": [TOOL]}
        gateway.engine.script.extend([said, said])
        plain = gateway.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        text, calls = "", list[Any]()
        for line in gateway.post("/v1/chat/completions", body | {"stream": True}).text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    calls += choice["delta"].get("tool_calls") or []
        assert text == (plain["content"] or "")
        assert [call["function"] for call in calls] == [
            call["function"] for call in plain.get("tool_calls") or []
        ]
        assert len(calls) == (2 if HERMES_CALL in said else 0)
        assert calls or "".join(text.split()) == "".join(said.split()), "nothing is dropped"


def test_calls_of_a_tool_prompt_can_be_required_and_limited(redis_url: str, tmp_path: Path) -> None:
    with running(MODELS["gemma3"], tmp_path, redis_url, tool_prompt="hermes") as gateway:
        assert gateway.chat("hi", tools=[TOOL], tool_choice="required").status_code == 200
        tag = gateway.engine.requests[-1]["sampling_params"]["structural_tag"]
        assert '{\\"name\\": \\"get\\", \\"arguments\\": ' in tag
        assert gateway.chat("hi", tools=[TOOL], parallel_tool_calls=False).status_code == 200
        reply = gateway.chat("hi", functions=[TOOL["function"]])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "functions")


def test_calls_that_a_parser_reads_can_be_required(redis_url: str, tmp_path: Path) -> None:
    with running(MODELS["qwen2.5"], tmp_path, redis_url) as gateway:
        for choice in ("required", {"type": "function", "function": {"name": "get"}}):
            assert gateway.chat("hi", tools=[TOOL], tool_choice=choice).status_code == 200
            tag = gateway.engine.requests[-1]["sampling_params"]["structural_tag"]
            assert '{\\"name\\": \\"get\\", \\"arguments\\": ' in tag, choice


def test_a_call_that_makes_the_template_run_forever_is_a_400(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it may use is CPU time, so that a standstill of the machine counts for nothing."""
    used = [0.0]
    for module in (own_template, template_sandbox):
        monkeypatch.setattr(module, "thread_time", lambda: used[0])
    trap = "{%- if messages[-1].content == 'trap' %}" + LOOP + "{%- endif %}"
    model = OwnModel(trap + BASE, CHATML, "<|im_end|>")
    with running(model, tmp_path, redis_url) as gateway, ThreadPoolExecutor(1) as pool:
        trapped = pool.submit(gateway.chat, "trap")
        assert gateway.chat("hi").status_code == 200
        assert not trapped.done(), "meanwhile, the gateway answers others"
        used[0] = 1000.0
        reply = trapped.result()
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages"), reply.text
        assert gateway.chat("hi").status_code == 200
