"""Three versions of the official `tinker` SDK against the real trainer and the real engine: values, errors,
checkpoints, samples; and a loop that does not notice what is killed under it."""

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from tests.support.clients.proxies import UnreliableProxy
from tests.support.clients.stack import CLIENT_KEY, ROOT
from tests.support.clients.tinker_stack import ADMIN_KEY, LOOP_WITHIN_S, MOST_KILLS, TinkerStack, tinker_stack
from tests.support.serving import serving
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_service.peft_models import peft_model

SDKS = ["tinker_first", "tinker_middle", "tinker_newest"]
TOLERANCE = 1e-5
"""float32: nats of a log-probability, and of a loss per token, between two implementations."""
DATA = [([5, 6, 7, 8], [6, 7, 8, 9]), ([20, 21, 22], [21, 22, 23])]
WEIGHTS = [[0.0, 1.0, 0.5, -2.0], [1.0, 0.0, 0.25]]
SAMPLED = [[0.0, -6.5, -7.1, -6.9], [-7.0, 0.0, -6.6]]
ADVANTAGES = [[0.0, 1.0, -0.5, 2.0], [1.5, 0.0, -1.0]]
MASK = [[0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0]]


MISSING = "404"
NOT_SERVED = {
    "whoami": "JWT",
    "assign_session_project": MISSING,
    "copy_weights": "destination_project_id: there are no projects here",
    "export_session_trace": MISSING,
    "get_audit_log": f"{MISSING}|incorrect event loop",  # older versions fail without a request
    "get_billing_usage": MISSING,
    "get_checkpoint_archive_url": MISSING,
    "get_checkpoint_archive_url_from_tinker_path": MISSING,
    "get_current_checkpoint_storage_usage": MISSING,
}
"""The methods of the SDK that fail, and a pattern of their errors (docs/tinker.md)."""
SERVED_TO = {"tinker_middle": {"copy_weights"}}
"""Those of them that a version of the SDK asks for in another way, which is served."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerStack]:
    model = make_tiny_model(tmp_path_factory.mktemp("tinker") / "models" / "tiny")
    with tinker_stack(tmp_path_factory.mktemp("stack"), model) as running:
        yield running


@pytest.fixture(scope="module")
def expected(running: TinkerStack) -> list[torch.Tensor]:
    """log p of each target under the base model, by plain transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(running.model, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([tokens])).logits[0] for tokens, _ in DATA]
    return [
        each.log_softmax(-1).gather(-1, torch.tensor(targets)[:, None])[:, 0].double()
        for each, (_, targets) in zip(logits, DATA, strict=True)
    ]


def losses_of(lp: list[torch.Tensor]) -> dict[str, float]:
    """The sum of each loss by its formula (spec of the wire, 6.1), in float64."""
    total: dict[str, float] = dict.fromkeys(("cross_entropy", "importance_sampling"), 0.0)
    total |= dict.fromkeys(("ppo", "cispo", "gspo", "dro"), 0.0)
    for at, lp_T in enumerate(lp):
        weights, q_T, a_T, mask = (
            torch.tensor(each[at], dtype=torch.float64) for each in (WEIGHTS, SAMPLED, ADVANTAGES, MASK)
        )
        ratio = (lp_T - q_T).exp()
        s = (((lp_T - q_T) * mask).sum() / mask.sum()).exp()
        total["cross_entropy"] -= float((weights * lp_T).sum())
        total["importance_sampling"] -= float((ratio * a_T).sum())
        total["ppo"] -= float(torch.minimum(ratio * a_T, ratio.clamp(0.9, 1.1) * a_T).sum())
        total["cispo"] -= float((ratio.clamp(0.0, 1.5) * lp_T * a_T).sum())
        clipped = s.clamp(1 - 3e-4, 1 + 4e-4)
        total["gspo"] -= float(torch.minimum(s * a_T, clipped * a_T).sum())
        total["dro"] -= float((lp_T * a_T - 0.5 * 0.05 * (lp_T - q_T) ** 2).sum())
    return total


@pytest.mark.parametrize("sdk", SDKS)
def test_values_are_those_of_plain_torch(
    running: TinkerStack, expected: list[torch.Tensor], sdk: str
) -> None:
    told = running.play(sdk, "losses")
    assert (told.pop("is_lora"), told.pop("rank")) == (True, 4)
    sums = losses_of(expected)
    assert set(told) == set(sums)
    for loss, value in told.items():
        for found, lp_T in zip(value["logprobs"], expected, strict=True):
            assert found == pytest.approx(lp_T.tolist(), abs=TOLERANCE)
        assert value["loss"] == pytest.approx(sums[loss], abs=TOLERANCE * 100), loss
        assert math.isfinite(value["grad_norm"])
        assert value["grad_norm"] > 0


@pytest.mark.parametrize("sdk", SDKS)
def test_steps_checkpoints_and_samples_belong_together(running: TinkerStack, sdk: str) -> None:
    told = running.play(sdk, "steps")
    assert told["after"]["loss"] < told["before"]["loss"]
    assert told["loaded"] == told["after"], "a checkpoint has the same weights"
    assert told["further"][0] == told["further"][1], "and the same optimizer"
    engine, trainer = told["scores"][1:], told["further"][1]["logprobs"][0]
    assert engine == pytest.approx(trainer, abs=TOLERANCE), "the engine samples from these weights"
    assert told["sampled"] == [[5, 5]] * 3
    if told["likeliest"]:  # the oldest version cannot ask for the scores of other tokens
        expected = told["likeliest"]["told"]
        expected[0][1] = 0.0
        for scored in told["likeliest"]["scored"]:
            assert [each == pytest.approx(top) for each, top in zip(scored, expected, strict=True)] == [
                True
            ] * 4


@pytest.mark.parametrize("sdk", SDKS)
def test_mistakes_are_named_and_the_loop_goes_on(running: TinkerStack, sdk: str) -> None:
    told = running.play(sdk, "errors")
    assert "`cross_entropy`, `importance_sampling`, `ppo`, `cispo`, `gspo`, `dro`" in told["no_such_loss"]
    assert 'loss_fn="ppo"' in told["stable_reinforce"]
    assert "has no setting `colour`" in told["ppo"]
    assert told["step"] == ["grad_norm"]


@pytest.mark.parametrize("sdk", SDKS)
def test_every_public_method_is_served_or_refused(running: TinkerStack, sdk: str) -> None:
    told = running.play(sdk, "methods")
    assert told["not_called"] == []
    assert len(told["told"]) > 70
    downloaded = told["downloaded"]
    if sdk != "tinker_first":  # which has no exports
        assert set(downloaded) == {"adapter_config.json", "adapter_model.safetensors"}
        assert min(downloaded.values()) > 0
    failed = {method: error for method, error in told["told"].items() if error}
    not_served = {name: why for name, why in NOT_SERVED.items() if name not in SERVED_TO.get(sdk, ())}
    for method, error in failed.items():
        name = method.partition(".")[2].removesuffix("_async")
        assert re.search(not_served.get(name, "it is served"), error), (method, error)
    assert {name for name in not_served if any(f".{name}" in each for each in told["told"])} == {
        method.partition(".")[2].removesuffix("_async") for method in failed
    }


@pytest.mark.parametrize("sdk", SDKS)
def test_a_loss_of_the_users_own_has_its_direct_gradient(running: TinkerStack, sdk: str) -> None:
    """The same step by torch alone, with the adapter that the trainer has published."""
    told = running.play(sdk, "custom")
    model_id = told["published"].removeprefix("tinker://").partition("/")[0]
    model = peft_model(running.model, running.adapter(model_id, 1), trainable=True)

    def logprobs() -> list[torch.Tensor]:
        logits = (model(torch.tensor([tokens])).logits[0].log_softmax(-1) for tokens, _ in DATA)
        return [
            each.gather(-1, torch.tensor(targets)[:, None])[:, 0]
            for each, (_, targets) in zip(logits, DATA, strict=True)
        ]

    before = logprobs()
    margin = before[0].sum() - before[1].sum()
    squares = sum(((each**2).sum() for each in before), torch.zeros(()))
    loss = -torch.nn.functional.logsigmoid(0.1 * margin) + 0.01 * squares
    loss.backward()  # type: ignore[no-untyped-call]
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert float(named["base_model.model.lm_head.lora_B.default.weight"].grad.abs().max()) > 0
    learns = list(named.values())
    norm = torch.nn.utils.clip_grad_norm_(learns, math.inf)
    torch.optim.AdamW(learns, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()
    for found, wanted in ((told["logprobs"], before), (told["after"], logprobs())):
        for mine, plain in zip(found, wanted, strict=True):
            assert mine == pytest.approx(plain.tolist(), abs=TOLERANCE)
    assert told["metrics"]["margin"] == pytest.approx(margin.item(), abs=TOLERANCE * 100)
    assert told["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_two_loops_at_once_are_each_as_if_alone(running: TinkerStack) -> None:
    def play(seed: str) -> Any:
        return running.play("tinker_newest", "loop", STEPS="20", SEED=seed)

    alone = [play(seed) for seed in ("1", "2")]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(play, ("1", "2")))
    assert alone[0]["steps"] != alone[1]["steps"]
    for one, other in zip(alone, together, strict=True):
        assert one["steps"] == other["steps"]
        assert one["end"] == other["end"], "bitwise"


def test_a_loop_learns_from_what_agents_did(running: TinkerStack) -> None:
    headers = {"authorization": f"Bearer {CLIENT_KEY}"}
    with httpx.Client(base_url=running.stack.gateway_url, headers=headers, timeout=60) as gateway:
        group = gateway.post("/groups", json={"size": 4, "task_id": "greeting"}).json()
        for at, session in enumerate(group["sessions"]):
            agent = OpenAI(base_url=session["base_url"], api_key=session["api_key"])
            messages: Any = [{"role": "user", "content": "hello"}]
            for _ in range(2):
                reply = agent.chat.completions.create(model="policy", messages=messages, max_tokens=6)
                messages += [
                    {"role": "assistant", "content": reply.choices[0].message.content or ""},
                    {"role": "user", "content": "and then?"},
                ]
            end = {"status": "completed", "reward": float(at % 2)}
            gateway.post(f"/sessions/{session['session_id']}/finish", json=end).raise_for_status()
    more = {"PYTHONPATH": str(ROOT / "deploy"), "WEIR_ADMIN_KEY": ADMIN_KEY}
    told = running.play("tinker_newest", "bridge", **more)
    assert told["rows"] >= 4
    assert told["tokens"][0] == told["tokens"][1] > 0
    assert told["difference"] <= 1e-4, "the trainer and the engine see the same weights"
    assert told["grad_norm"] > 0


def test_a_bad_network_changes_nothing_that_a_loop_can_see(running: TinkerStack) -> None:
    alone: Any = running.play("tinker_newest", "loop", STEPS="40")
    proxy = UnreliableProxy(running.stack.gateway_url, seed=5)
    with serving(proxy.app()) as url:
        disturbed = running.play("tinker_newest", "loop", STEPS="40", TINKER_BASE_URL=url)
    print(f"the network: {dict(proxy.done)}")
    assert min(proxy.done[each] for each in ("lost", "twice", "delayed")) > 0
    assert disturbed["steps"] == alone["steps"]
    assert disturbed["end"] == alone["end"], "bitwise"


@pytest.mark.timeout(2 * LOOP_WITHIN_S)
def test_kills_change_nothing_that_a_loop_can_see(running: TinkerStack) -> None:
    steps = str(35 * MOST_KILLS)  # a quick machine takes some 10 steps a second
    alone: Any = running.play("tinker_newest", "loop", STEPS=steps)
    assert all(one[0] != other[0] for one, other in pairwise(alone["steps"]))
    with running.killing(seed=1, most=MOST_KILLS, pause_s=(1.0, 6.0)):
        disturbed = running.play("tinker_newest", "loop", STEPS=steps)
    print(f"killed: {running.kills}")
    assert "trainer_service" in running.kills, "the loop was over before the trainer was killed"
    assert disturbed["steps"] == alone["steps"]
    assert disturbed["end"] == alone["end"], "bitwise"
    scores = [
        value
        for pair in zip(alone["scores"], disturbed["scores"], strict=True)
        for value in zip(*pair, strict=True)
    ]
    assert all(one == other == None or one == pytest.approx(other, abs=TOLERANCE) for one, other in scores)  # noqa: E711
