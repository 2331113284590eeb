"""OpenAI's routes for graders, called with OpenAI's client."""

import gzip
import json
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from threading import Event
from typing import Any

import openai
import pytest

from tests.support.gateway.running import RunningGateway
from tests.support.reward_service.graders import CHECK, LABEL, MULTI, PYTHON, SCORE, SIMILAR
from tests.support.reward_service.running import CLIENT_KEY, RunningRewards, reward_service
from tests.support.reward_service.scripted_judge import ScriptedOpenAi, ScriptedReply
from tests.support.serving import serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def rewards() -> Iterator[RunningRewards]:
    with reward_service() as running:
        yield running


@pytest.mark.parametrize(
    ("grader", "reward"),
    [(CHECK, 0.0), (SIMILAR, 0.8), (PYTHON, 11 / 7), (MULTI, 0.4)],
    ids=lambda each: str(each)[:20],
)
def test_openais_client_runs_and_validates_graders(
    rewards: RunningRewards, grader: Any, reward: float
) -> None:
    graders = rewards.openai().fine_tuning.alpha.graders
    valid = graders.validate(grader=grader)
    assert valid.grader is not None
    assert valid.grader.to_dict() == grader
    found = graders.run(grader=grader, model_sample="the big cat", item={"answer": "the cat"})
    assert found.reward == pytest.approx(reward)
    assert (found.metadata.name, found.metadata.type) == (grader["name"], grader["type"])
    assert found.metadata.execution_time > 0
    assert not any(found.metadata.errors.to_dict().values())
    assert found.sub_rewards == ({"equal": 0.0, "similar": pytest.approx(0.8)} if grader is MULTI else {})


UNUSABLE = [
    ("def grade(:", "SyntaxError"),
    ("x = 1", "no function grade(sample, item)"),
    ("import nosuchlibrary\ndef grade(sample, item):\n    return 1.0", "line 1, ModuleNotFoundError"),
    ("def grade(sample):\n    return 1.0", "TypeError"),
    ("grade = 1", "no function grade(sample, item)"),
    ("import os\nos._exit(0)", "exited"),
    ("raise SystemExit(1)", "SystemExit"),
    ("while True: pass", "timeout"),
    ("(" * 100_000, "SyntaxError"),
]


@pytest.mark.parametrize(("source", "why"), UNUSABLE, ids=[why for _, why in UNUSABLE])
def test_a_python_grader_that_could_grade_nothing_is_refused_at_its_source(source: str, why: str) -> None:
    python = {"type": "python", "name": "own", "source": source}
    multi = MULTI | {"graders": {"equal": CHECK, "similar": python}}
    with reward_service(python={"timeout_s": 10}) as rewards:
        for path, more in (("validate", {}), ("run", {"model_sample": "x"})):
            for grader, where in ((python, "grader.source"), (multi, "grader.graders.similar.source")):
                body = {"grader": grader, **more}
                reply = rewards.post(f"/v1/fine_tuning/alpha/graders/{path}", json=body)
                error = reply.json()["error"]
                assert (reply.status_code, error["param"]) == (400, where)
                assert why in error["message"]


def test_every_field_of_openais_answer_is_there(rewards: RunningRewards) -> None:
    answer = rewards.run(CHECK, "x", item={"answer": "x"}).json()
    assert answer["reward"] == 1.0
    assert answer.keys() == {"reward", "sub_rewards", "metadata", "model_grader_token_usage_per_model"}
    errors = answer["metadata"].pop("errors")
    assert answer["metadata"].keys() == {
        *("name", "type", "execution_time", "scores", "token_usage", "sampled_model_name")
    }
    details = [name for name in errors if name.startswith(("python", "model")) and errors[name] is None]
    assert sorted(details) == [
        "model_grader_server_error_details",
        "python_grader_runtime_error_details",
        "python_grader_server_error_type",
    ]
    assert {name for name in errors if errors[name] is False} == {
        *("formula_parse_error", "sample_parse_error", "truncated_observation_error"),
        *("unresponsive_reward_error", "invalid_variable_error", "other_error"),
        *("python_grader_server_error", "python_grader_runtime_error", "model_grader_server_error"),
        *("model_grader_refusal_error", "model_grader_parse_error"),
    }
    assert len(errors) == 3 + 11


@pytest.mark.parametrize(
    ("grader", "content", "reward"),
    [(SCORE, '{"steps": [], "result": 0.75}', 0.75), (LABEL, '{"steps": [], "result": "good"}', 1.0)],
)
def test_openais_client_runs_graders_that_ask_a_model(grader: Any, content: str, reward: float) -> None:
    model = ScriptedOpenAi(lambda _: ScriptedReply(content))
    with (
        serving(model) as url,
        reward_service(judge={"base_url": f"{url}/v1/", "api_key": "sk-own"}) as rewards,
    ):
        graders = rewards.openai().fine_tuning.alpha.graders
        found = graders.run(grader=grader, model_sample="big cat", item={"answer": "big"})
    assert found.reward == reward
    assert (found.metadata.sampled_model_name, found.metadata.token_usage) == ("judge-2026", 15)
    usage = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15, "cached_tokens": 2}
    assert found.api_model_grader_token_usage_per_model == {"judge-2026": usage}
    assert model.keys == ["Bearer sk-own"]
    (body,) = model.bodies
    assert body["messages"][0]["content"] == ("Is it big? big cat" if grader is SCORE else "big cat")
    assert body["response_format"]["json_schema"]["strict"] is True


def test_a_models_failure_is_an_error_of_the_grader() -> None:
    replies = [ScriptedReply(status=500), ScriptedReply("good?"), ScriptedReply(None, refusal="no")]
    with (
        serving(ScriptedOpenAi(lambda _: replies.pop(0))) as url,
        reward_service(judge={"base_url": url}) as rewards,
    ):
        flags = [rewards.run(LABEL, "x").json()["metadata"]["errors"] for _ in range(3)]
    assert flags[0]["model_grader_server_error"] is True
    assert flags[0]["model_grader_server_error_details"] == "HTTP 500: overloaded"
    assert flags[1]["model_grader_parse_error"] is flags[2]["model_grader_refusal_error"] is True


def test_a_model_that_is_too_busy_is_asked_again_until_the_time_is_over(turned: TurnedClock) -> None:
    answer = ScriptedReply('{"steps": [], "result": 0.75}')
    replies = [ScriptedReply(status=429), ScriptedReply(status=503), answer]
    with (
        serving(ScriptedOpenAi(lambda _: replies.pop(0))) as url,
        reward_service(judge={"base_url": url}) as rewards,
    ):
        assert rewards.run(SCORE, "x", item={"answer": "big"}).json()["reward"] == 0.75
    busy = ScriptedOpenAi(lambda _: ScriptedReply(status=429))
    with (
        serving(busy) as url,
        reward_service(judge={"base_url": url}) as rewards,
        ThreadPoolExecutor(1) as pool,
    ):
        run = pool.submit(rewards.run, SCORE, "x", item={"answer": "big"})
        wait_until(lambda: len(busy.bodies) > 1)  # the first answer was heard
        turned.turn(120)
        errors = run.result().json()["metadata"]["errors"]
    assert errors["model_grader_server_error_details"] == "no answer within 120.0 s: HTTP 429: overloaded"


def test_by_default_the_gateways_model_grades_in_a_session_that_is_never_trained(
    gateway: RunningGateway,
) -> None:
    gateway.engine.script.append('{"steps": [], "result": 0.5}')
    with reward_service(gateway_url=gateway.url) as rewards:
        grader = SCORE | {"sampling_params": {"temperature": 0.5}}
        found = rewards.run(grader, "big cat", item={"answer": "big"}).json()
    assert (found["reward"], found["metadata"]["sampled_model_name"]) == (0.5, "judge")
    (session,) = gateway.get("/sessions", key="admin-key").json()["data"]
    assert session["session_id"].startswith("weir-judge-")
    assert (session["state"], session["status"], session["turn_count"]) == ("finished", "abandoned", 1)
    spec = gateway.get(f"/sessions/{session['session_id']}?text=true", key="admin-key").json()
    assert "Is it big? big cat" in spec["turns"][0]["context_text"]
    assert spec["turns"][0]["verdict"]["code"] == "abandoned"
    # In a session for training, the gateway would sample with its own temperature.
    assert spec["turns"][0]["sampling"]["used"]["temperature"] == 0.5


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"grader": CHECK | {"operation": "regex"}}, "grader.string_check.operation"),
        ({"grader": SIMILAR | {"evaluation_metric": "cosine"}}, "grader.text_similarity.evaluation_metric"),
        ({"grader": MULTI | {"calculate_output": "equal +"}}, "grader.multi"),
        ({"grader": {"type": "regex"}}, "grader"),
        ({"grader": "check"}, "grader"),
        ({"model_sample": None}, "model_sample"),
        ({"item": [1]}, "item"),
        ({"more": 1}, "more"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(
    rewards: RunningRewards, changes: dict[str, Any], param: str
) -> None:
    body = {"grader": CHECK, "model_sample": "x"} | changes
    reply = rewards.post("/v1/fine_tuning/alpha/graders/run", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")


def test_openais_client_raises_for_a_metric_that_is_not_available(rewards: RunningRewards) -> None:
    cosine: Any = SIMILAR | {"evaluation_metric": "cosine"}
    with pytest.raises(openai.BadRequestError, match="cosine needs an embedding model"):
        rewards.openai().fine_tuning.alpha.graders.validate(grader=cosine)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"grader": NaN}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_a_400(rewards: RunningRewards, content: bytes) -> None:
    reply = rewards.post("/v1/fine_tuning/alpha/graders/run", content=content)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_body_that_is_too_large_is_a_413() -> None:
    def pieces() -> Iterator[bytes]:
        yield from [b'{"model_sample": "', *[b"x" * 1000] * 5, b'"}']

    with reward_service(limits={"body_bytes": 4000}) as rewards:
        for content in (b"x" * 5000, pieces()):
            reply = rewards.post("/v1/fine_tuning/alpha/graders/run", content=content)
            assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")
        assert rewards.run(CHECK, "x", item={"answer": "x"}).status_code == 200
        body = json.dumps({"grader": CHECK, "model_sample": "x", "item": {"answer": "x"}}).encode()
        for content, coding, status in (
            (gzip.compress(body), "gzip", 200),
            (gzip.compress(body + b" " * 5000), "gzip", 413),
            (body, "gzip", 400),
            (body, "br", 415),
        ):
            headers = {"content-encoding": coding, "content-type": "application/json"}
            reply = rewards.post("/v1/fine_tuning/alpha/graders/run", content=content, headers=headers)
            assert reply.status_code == status, coding


def test_keys_decide_who_grades_and_who_brings_python(rewards: RunningRewards) -> None:
    item = {"answer": "x"}
    assert rewards.run(CHECK, "x", key=None, item=item).status_code == 401
    assert rewards.run(CHECK, "x", key="other", item=item).status_code == 401
    assert rewards.run(CHECK, "x", key=CLIENT_KEY, item=item).status_code == 200
    for grader in (PYTHON, MULTI | {"graders": {"equal": PYTHON, "similar": SIMILAR}}):
        reply = rewards.run(grader, "x", key=CLIENT_KEY, item=item)
        assert (reply.status_code, reply.json()["error"]["type"]) == (403, "permission_error")
    with reward_service(python={"from_clients": True}) as permissive:
        assert permissive.run(PYTHON, "x", key=CLIENT_KEY, item=item).json()["reward"] == 1.0


@pytest.mark.parametrize("asks", [SCORE, LABEL], ids=["score", "label"])
def test_a_clients_grader_asks_only_models_that_the_operator_lends_and_only_so_much(asks: Any) -> None:
    nested = MULTI | {"graders": {"equal": CHECK, "similar": asks}}
    model = ScriptedOpenAi(lambda _: ScriptedReply('{"steps": [], "result": "good"}'))
    item = {"answer": "x"}
    with serving(model) as url:
        with reward_service(judge={"base_url": url}) as rewards:
            for grader in (asks, nested, asks | {"model": "other"}):
                reply = rewards.run(grader, "x", key=CLIENT_KEY, item=item)
                assert (reply.status_code, reply.json()["error"]["param"]) == (403, "grader.model")
            assert model.bodies == []
            assert rewards.run(asks, "x", item=item).status_code == 200, "an admin asks any model"
        lent = {"base_url": url, "client_models": ["judge"], "client_tokens_per_hour": 40}
        with reward_service(judge=lent, client_keys=[CLIENT_KEY, "another"]) as rewards:
            other = rewards.run(asks | {"model": "other"}, "x", key=CLIENT_KEY, item=item)
            assert other.status_code == 403
            asked = [rewards.run(nested, "x", key=CLIENT_KEY, item=item) for _ in range(5)]
            assert [reply.status_code for reply in asked] == [200, 200, 200, 429, 429], "15 tokens each"
            assert 3000 < int(asked[-1].headers["retry-after"]) <= 3601
            assert rewards.run(CHECK, "x", key=CLIENT_KEY, item=item).status_code == 200
            assert rewards.run(asks, "x", key="another", item=item).status_code == 200
            assert rewards.run(asks, "x", item=item).status_code == 200


def test_a_multi_grader_ends_where_the_tokens_of_its_key_do() -> None:
    model = ScriptedOpenAi(lambda _: ScriptedReply('{"steps": [], "result": 0.5}'))
    many = {"graders": {f"g{n}": SCORE for n in range(9)}, "calculate_output": "g0"}
    lent = {"client_models": ["judge"], "client_tokens_per_hour": 40}
    with serving(model) as url, reward_service(judge=lent | {"base_url": url}) as rewards:
        reply = rewards.run(MULTI | many, "x", key=CLIENT_KEY, item={"answer": "x"})
    assert (reply.status_code, len(model.bodies)) == (429, 3)


def test_a_run_ends_in_time() -> None:
    endless = {"type": "python", "source": "def grade(sample, item):\n    while True: pass"}
    with reward_service(limits={"run_timeout_s": 1}) as rewards:
        errors = rewards.run(endless, "x").json()["metadata"]["errors"]
    assert errors["unresponsive_reward_error"] is True


def test_only_so_many_requests_are_graded_and_wait() -> None:
    answers, item, limits = Event(), {"answer": "x"}, {"runs": 1, "waiting": 0}
    model = ScriptedOpenAi(lambda _: ScriptedReply(str(float(answers.wait(300)))))
    with (
        serving(model) as url,
        reward_service(judge={"base_url": url}, limits=limits) as rewards,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(rewards.run, SCORE, "x", item=item)
        wait_until(lambda: model.bodies)
        refused = [rewards.run(SCORE, "x", item=item) for _ in range(2)]
        answers.set()
        assert first.result().json()["reward"] == 1.0
    assert [(each.status_code, each.headers["retry-after"]) for each in refused] == [(429, "1")] * 2


def test_metrics_count_what_ran(rewards: RunningRewards) -> None:
    name = 'weir_rewards_grader_runs_total{outcome="error",type="string_check"}'
    before = rewards.metric(name)
    rewards.run(CHECK, "x", item={})
    assert rewards.metric(name) == before + 1
    assert rewards.get("/live", None).status_code == rewards.get("/ready", None).status_code == 200


def test_a_python_grader_starts_beside_much_memory(rewards: RunningRewards) -> None:
    """A copy of this process would need more memory than the kernel grants at once."""
    four_fifths = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5
    with ExitStack() as reserved:
        with suppress(OSError):  # where the kernel grants less, that is much already
            for _ in range(3):
                much = mmap.mmap(-1, four_fifths, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                reserved.enter_context(much)
        reply = rewards.run(PYTHON, "x", item={"answer": "x"})
    assert reply.json()["reward"] == 1.0
