"""Which sampling parameters are used: those of the deployment, the session, or the call."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generations.generation import Call
from gateway.generations.generator import decide
from gateway.settings import GatewaySettings, SamplingSettings
from rollout_queue.contract.records import SamplingMode, SamplingPolicy, inexact
from tests.support.gateway.running import Backends, RunningGateway

HARNESS: dict[str, Any] = {
    "temperature": 0.2,
    "top_p": 0.5,
    "top_k": 5,
    "frequency_penalty": 1.5,
    "presence_penalty": 0.5,
    "logit_bias": {"100": -5},
}
"""Sampling parameters that an agent's framework sets in its code."""
EXACT = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def sent(gateway: RunningGateway) -> dict[str, Any]:
    """The sampling parameters of the engine's last request."""
    parameters: dict[str, Any] = gateway.engine.requests[-1]["sampling_params"]
    return parameters


def test_training_traffic_is_sampled_from_the_policy_itself(gateway: RunningGateway) -> None:
    """At the call's temperature, at which logprobs are as exact as at any other above 0."""
    reply = gateway.chat(**HARNESS)
    assert sent(gateway).items() >= (EXACT | {"temperature": 0.2}).items()
    assert not {"frequency_penalty", "presence_penalty", "logit_bias"} & sent(gateway).keys()
    (turn,) = gateway.turns_of(reply)
    assert turn["sampling"]["asked"].items() >= HARNESS.items()
    assert turn["sampling"]["used"].items() >= (EXACT | {"temperature": 0.2}).items()
    assert turn["verdict"]["code"] == "open"
    assert json.loads(reply.headers["x-weir-sampling"]) == turn["sampling"]["used"]
    assert json.loads(reply.headers["x-weir-sampling-asked"]) == turn["sampling"]["asked"]


HI = [{"role": "user", "content": "hi"}]
DIALECTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/chat/completions", {"messages": HI, "n": 2}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 8}),
]
TOKEN_IDS = "/inference/v1/generate"
GREEDY = "would make the logprobs inexact"


def test_a_call_keeps_its_temperature_where_training_is_exact(backends: Backends) -> None:
    """In every dialect, plain and streamed. The deployment's is for calls that name none, or a greedy one."""
    backends.clear(None)
    asked = [(0.25, 0.25), (2.0, 2.0), (None, 0.75), (0, 0.75), (1e-7, 0.75)]
    with backends.gateway(sampling={"temperature": 0.75}) as gateway:
        for path, body in DIALECTS:
            for (named, used), stream in [(each, stream) for each in asked for stream in (False, True)]:
                fields = {} if named is None else {"temperature": named}
                reply = gateway.post(path, body | fields | {"stream": stream})
                engines = gateway.engine.requests[-body.get("n", 1) :]
                case = (path, named, stream)
                assert [each["sampling_params"]["temperature"] for each in engines] == [used] * len(engines)
                told = json.loads(reply.headers["x-weir-sampling"])
                assert told["temperature"] == used, case
                assert (GREEDY in told.get("why", "")) == (named not in (None, used)), case
                assert {turn["sampling"]["used"]["temperature"] for turn in gateway.turns_of(reply)} == {used}
        for named, used in asked:
            fields = {} if named is None else {"temperature": named}
            reply = gateway.post(TOKEN_IDS, {"token_ids": [5, 6], "sampling_params": fields})
            assert sent(gateway)["temperature"] == used, reply.text


def test_a_retry_is_sampled_as_its_first_attempt(gateway: RunningGateway) -> None:
    session = gateway.session()
    for attempt in ("0", "1"):
        headers = {"x-stainless-retry-count": attempt}
        gateway.chat(session=session, headers=headers, temperature=0.3)
        assert sent(gateway)["temperature"] == 0.3


def test_the_reply_says_why_a_call_was_sampled_otherwise_than_it_asked(gateway: RunningGateway) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
        ({}, {"temperature": 0.5, "top_p": 1.0}, None),
        ({}, {"temperature": 0}, f"temperature 0: {GREEDY} of a trained answer (sampling.mode exact)"),
        ({}, {"top_p": 0.5, "logit_bias": {"9": 1}}, f"top_p 0.5, logit_bias: {GREEDY} of a trained answer"),
        ({}, {"seed": 3}, "seed: a group would sample one answer"),
        ({"sampling": {"max_tokens": 3}}, {"max_tokens": 5}, "max_tokens 5: the session allows 3"),
        ({"sampling": {"mode": "enforce"}}, {"temperature": 0.5}, "sampling.mode enforce"),
        ({"sampling": {"mode": "default"}}, {"frequency_penalty": 1}, "sampling.mode default"),
        ({"train": False}, HARNESS | {"temperature": 0, "seed": 1}, None),
        ({"policy": "policy@0"}, HARNESS | {"temperature": 0, "seed": 1}, None),
    ]
    for session, asked, why in cases:
        reply = gateway.chat(session=gateway.session(**session), **asked)
        told = json.loads(reply.headers["x-weir-sampling"]).get("why")
        assert (told is None) if why is None else (why in (told or "")), (asked, told)
    many = gateway.chat(max_tokens=2**20)
    assert "the context has room for" in json.loads(many.headers["x-weir-sampling"])["why"]


def test_a_call_of_a_pinned_version_is_sampled_as_it_asks(gateway: RunningGateway) -> None:
    """It is an evaluation, whatever its session is."""
    gateway.chat(session=gateway.session(), model="policy@0", **HARNESS | {"temperature": 0})
    assert sent(gateway).items() >= (HARNESS | {"temperature": 0}).items()


NUMBERS = st.floats(0, 2) | st.sampled_from([0, 1, 1e-300, 1e-6, 9e-7])
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "temperature": NUMBERS,
        "top_p": st.floats(0.01, 1),
        "top_k": st.sampled_from([-1, 1, 50]),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.5, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.sampled_from([{}, {"5": 1.0}]),
        "min_tokens": st.integers(0, 40),
        "max_tokens": st.integers(1, 40),
        "seed": st.integers(0, 9),
    },
)


@given(ASKED, st.sampled_from(["exact", "enforce"]), st.floats(0.1, 2))
def test_a_trained_answer_is_exact_whatever_is_asked(
    asked: dict[str, Any], mode: SamplingMode, usual: float
) -> None:
    policy = SamplingPolicy.of(mode, temperature=usual)
    sampling = decide(policy, Call([], asked=asked), 4096, train=True)
    assert not inexact(sampling.used)
    named = asked.get("temperature", 0)
    own = mode == "exact" and not inexact({"temperature": named})
    assert sampling.used["temperature"] == (named if own else usual)
    free = decide(policy, Call([], asked=asked), 4096, train=False).used
    wanted = {**asked, "temperature": 0} if 0 < named < 1e-6 else asked
    wanted = {name: value for name, value in wanted.items() if name != "min_tokens"}
    assert {name: free.get(name, value) for name, value in wanted.items()} == wanted
    assert set(sampling.used) - set(free) <= {"why"}


def test_a_sessions_policy_is_read_by_a_release_without_the_mode_exact() -> None:
    """Within a schema, an older gateway goes on with the sessions of a newer one."""
    stored = msgspec.to_builtins(SamplingPolicy.of("exact", temperature=0.5))
    assert stored["mode"] == "enforce"
    assert msgspec.convert(stored, SamplingPolicy).named_mode == "exact"
    assert SamplingPolicy.of("enforce").named_mode == SamplingPolicy().named_mode == "enforce"


def test_all_five_parameters_are_always_sent(gateway: RunningGateway) -> None:
    for mode in ("exact", "enforce", "default", "allow"):
        gateway.chat(session=gateway.session(sampling={"mode": mode}))
        assert EXACT.keys() <= sent(gateway).keys(), mode


def test_default_fills_in_what_a_call_leaves_out_and_keeps_penalties_away(gateway: RunningGateway) -> None:
    session = gateway.session(sampling={"mode": "default", "temperature": 0.7, "top_p": 0.9})
    gateway.chat(session=session)
    assert (sent(gateway)["temperature"], sent(gateway)["top_p"]) == (0.7, 0.9)
    gateway.chat(session=session, **HARNESS)
    assert (sent(gateway)["temperature"], sent(gateway)["top_p"], sent(gateway)["top_k"]) == (0.2, 0.5, 5)
    assert "frequency_penalty" not in sent(gateway)


def test_a_call_decides_for_itself_where_it_may(gateway: RunningGateway) -> None:
    bodies: list[dict[str, Any]] = [{"sampling": {"mode": "allow"}}, {"train": False}]
    for body in bodies:
        session = gateway.session(**body)
        assert gateway.chat(session=session, **HARNESS).status_code == 200
        assert sent(gateway).items() >= HARNESS.items(), body
        (turn,) = gateway.turns(session)
        assert turn["sampling"]["asked"] == HARNESS, body


def test_a_deployment_sets_the_parameters_of_sessions_that_set_none(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(sampling={"mode": "default", "temperature": 0.6}) as gateway:
        gateway.chat()
        assert sent(gateway)["temperature"] == 0.6
        session = gateway.session(sampling={"mode": "enforce", "temperature": 0.9})
        gateway.chat(session=session, **HARNESS)
        assert sent(gateway)["temperature"] == 0.9


def test_what_only_other_servers_take_reaches_the_engine_in_its_own_words(gateway: RunningGateway) -> None:
    session = gateway.session(train=False)
    greedy = {"top_p": 1.0, "top_k": 1}
    for asked, used in (
        ({"top_k": 0}, {"top_k": -1, "top_p": 1.0}),
        ({"top_p": 0}, greedy),
        ({"top_p": 0, "top_k": 0}, greedy),
        ({"top_p": 0, "top_k": 7, "temperature": 0.5}, greedy | {"temperature": 0.5}),
        ({"temperature": 1e-7}, {"temperature": 0}),
    ):
        for path, body in (
            ("chat/completions", {"messages": [SAID], **asked}),
            ("completions", {"prompt": "hi", **asked}),
            ("messages", {"messages": [SAID], "max_tokens": 9, **asked}),
        ):
            reply = gateway.post(f"/sessions/{session['session_id']}/v1/{path}", body)
            assert reply.status_code == 200, (asked, reply.text)
            assert sent(gateway).items() >= used.items(), (asked, path)
            turn = gateway.turns(session)[-1]
            assert turn["sampling"]["asked"].items() >= asked.items()
            assert turn["sampling"]["used"].items() >= used.items()
    ids = {"token_ids": [5], "sampling_params": {"top_k": 0, "top_p": 0}}
    assert gateway.post(f"/sessions/{session['session_id']}/inference/v1/generate", ids).status_code == 200
    assert sent(gateway).items() >= greedy.items()
    refused = gateway.chat(session=session, repetition_penalty=0)
    assert refused.json()["error"]["param"] == "repetition_penalty"


SAID: Any = {"role": "user", "content": "hi"}
INEXACT: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.5, "top_k": 5}, "top_p 0.5, top_k 5"),
    ({"min_p": 0.1}, "min_p 0.1"),
    ({"repetition_penalty": 1.2, "frequency_penalty": 0.5}, "repetition_penalty 1.2, frequency_penalty 0.5"),
    ({"logit_bias": {"100": -5}}, "logit_bias"),
    ({"temperature": 0}, "temperature 0"),
    ({"temperature": 1e-9}, "temperature 0"),
    ({"top_p": 0}, "top_k 1"),
]


def test_a_turn_whose_logprobs_are_of_another_distribution_is_not_trained(gateway: RunningGateway) -> None:
    session = gateway.session(sampling={"mode": "allow"})
    gateway.chat("the first", session=session, temperature=0.5, top_p=1.0)
    for asked, _ in INEXACT:
        gateway.chat(f"another with {asked}", session=session, **asked)
    first, *others = [turn["verdict"] for turn in gateway.turns(session)]
    assert first["code"] == "open"
    for verdict, (asked, named) in zip(others, INEXACT, strict=True):
        assert verdict["code"] == "not_for_training", asked
        assert verdict["detail"].startswith(f"sampled with {named}: "), asked


def test_a_gateway_whose_defaults_keep_every_turn_from_training_does_not_start(backends: Backends) -> None:
    for defaults in (SamplingSettings(top_p=0.9), SamplingSettings(temperature=0)):
        with pytest.raises(ValueError, match="unless train_inexact is true"):
            GatewaySettings(model_path=backends.model_path, sampling=defaults)


def test_a_deployment_may_train_such_turns(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(sampling={"mode": "default"}, train_inexact=True) as gateway:
        reply = gateway.chat(top_p=0.5)
        (turn,) = gateway.turns_of(reply)
        assert (sent(gateway)["top_p"], turn["verdict"]["code"]) == (0.5, "open")


def test_a_harness_with_a_fixed_seed_does_not_make_a_group_sample_one_answer(gateway: RunningGateway) -> None:
    reply = gateway.chat(seed=41)
    assert "sampling_seed" not in sent(gateway)
    (turn,) = gateway.turns_of(reply)
    assert (turn["sampling"]["asked"]["seed"], "seed" in turn["sampling"]["used"]) == (41, False)


def test_every_choice_has_a_seed_of_its_own(gateway: RunningGateway) -> None:
    gateway.chat(session=gateway.session(train=False), n=3, seed=41)
    seeds = [request["sampling_params"]["sampling_seed"] for request in gateway.engine.requests]
    assert sorted(seeds) == [41, 42, 43]


def test_an_answer_may_use_what_the_context_leaves(gateway: RunningGateway) -> None:
    reply = gateway.chat()
    (turn,) = gateway.turns_of(reply)
    assert sent(gateway)["max_new_tokens"] == 4096 - turn["context_len"]
    gateway.chat(max_tokens=7)
    assert sent(gateway)["max_new_tokens"] == 7
    gateway.chat(max_completion_tokens=5, max_tokens=7)
    assert sent(gateway)["max_new_tokens"] == 5
    session = gateway.session(sampling={"max_tokens": 3})
    gateway.chat(session=session, max_tokens=7)
    assert sent(gateway)["max_new_tokens"] == 3
