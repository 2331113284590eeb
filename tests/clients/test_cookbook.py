"""The loops of `tinker-cookbook`, as they are published, on the real trainer and the real engine."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest

from tests.support.clients.proxies import CountingProxy
from tests.support.clients.tinker_stack import TinkerStack, tinker_stack
from tests.support.serving import serving
from tests.support.tiny_model import PEAKED, make_tiny_model

FORMER, NEWEST = "cookbook_former", "cookbook_newest"
TOLERANCE = 1e-5
"""float32: nats of a log-probability, between engine and trainer."""
STEPS, SAMPLES = 8, 128
"""The program's steps, and its samples: 8 steps of 4 groups of 4 rollouts."""
NOWHERE = "http://127.0.0.1:9"
"""The cookbook asks its vendor's site for prices. It goes on without them."""
REWARD = "env/all/reward/total"
PER_STEP = {"forward_backward": STEPS, "optim_step": STEPS}
SAVES = {"save_weights_for_sampler": 10, "save_weights": 3}
ASKED = {
    "synchronous": {"asample": SAMPLES, **PER_STEP, **SAVES},
    "minibatches": {"asample": SAMPLES, **PER_STEP, "forward_backward": 2 * STEPS, **SAVES},
    "ppo": {"asample": 2 * SAMPLES, "forward_backward": 2 * STEPS, "optim_step": 2 * STEPS, **SAVES},
    "penalty": {"asample": 2 * SAMPLES, **PER_STEP, **SAVES},
}
"""What each mode asks for, as it does of the vendor's service. A second sample of each rollout scores it."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerStack]:
    directory = tmp_path_factory.mktemp("cookbook") / "models" / "tiny"
    model = make_tiny_model(directory, head_scale=PEAKED)
    with tinker_stack(tmp_path_factory.mktemp("stack"), model) as running:
        yield running


def played(running: TinkerStack, client: str, scene: str) -> tuple[Any, Counter[str]]:
    """What the program told, and how often it asked for what. No request may be refused."""
    proxy = CountingProxy(running.stack.gateway_url)
    with serving(proxy.app()) as url:
        told = running.play(client, scene, TINKER_BASE_URL=url, HTTPS_PROXY=NOWHERE)
    assert not proxy.refused
    promises = ("create_model", "load_weights", "forward_backward", "optim_step", "asample", *SAVES)
    assert proxy.counts["retrieve_future"] >= sum(proxy.counts[each] for each in promises)
    return told, proxy.counts


def column(steps: list[dict[str, float]], name: str) -> list[float]:
    """The last line of some runs has totals only."""
    return [step[name] for step in steps if name in step]


def assert_rises(rewards: list[float]) -> None:
    assert len(rewards) == STEPS
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.2


@pytest.mark.parametrize("client", [FORMER, NEWEST])
@pytest.mark.parametrize("mode", ASKED)
def test_each_mode_of_reinforcement_learning_runs_as_published(
    running: TinkerStack, client: str, mode: str
) -> None:
    told, counts = played(running, client, mode)
    steps = told["steps"]
    assert {each: counts[each] for each in ASKED[mode]} == ASKED[mode]
    assert len(column(steps, REWARD)) == STEPS
    on_policy = column(steps, "optim/kl_sample_train_v2")
    if mode == "ppo":
        assert max(on_policy) > TOLERANCE, "the second substep trains on samples of the first one's weights"
        assert max(column(steps, "kl_pre_post_v2")) > TOLERANCE
    else:
        assert math.sqrt(2 * max(on_policy)) < TOLERANCE, "the engine and the trainer have the same weights"
    if mode == "penalty":
        distances = column(steps, "kl_policy_base")
        assert distances[0] == pytest.approx(0, abs=TOLERANCE), "the first policy is the base model"
        assert all(distance > TOLERANCE for distance in distances[1:])
    if mode == "synchronous":
        assert_rises(column(steps, REWARD))


@pytest.mark.parametrize("client", [FORMER, NEWEST])
def test_a_loop_may_sample_while_it_trains(running: TinkerStack, client: str) -> None:
    told, counts = played(running, client, "asynchronous")
    assert counts["asample"] == SAMPLES
    assert 0 < counts["forward_backward"] == counts["optim_step"] <= STEPS
    distances = column(told["steps"], "optim/kl_sample_train_v2")
    assert len(distances) == counts["optim_step"]
    assert distances[0] < TOLERANCE < max(distances), "later samples are older than the weights they train"


def test_a_loss_that_nobody_has_published_is_refused_by_its_name(running: TinkerStack) -> None:
    told, counts = played(running, NEWEST, "unset")
    assert counts["forward_backward"] == 1
    assert "stable_reinforce is not offered" in told["error"]
    assert 'in tinker-cookbook, set `loss_fn="ppo"`' in told["error"]


def test_a_loop_goes_on_from_its_checkpoint(running: TinkerStack) -> None:
    told, counts = played(running, NEWEST, "resumed")
    assert (counts["create_model"], counts["load_weights"]) == (1, 1)
    assert len(column(told["half"], REWARD)) == STEPS // 2
    assert column(told["steps"], "progress/batch") == list(range(STEPS))
    assert_rises(column(told["steps"], REWARD))


@pytest.mark.parametrize("client", [FORMER, NEWEST])
def test_an_answer_is_learned_by_heart(running: TinkerStack, client: str) -> None:
    told, _ = played(running, client, "supervised")
    losses = column(told["steps"], "train_mean_nll")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2


def test_preferences_are_learned_through_a_loss_of_the_client(running: TinkerStack) -> None:
    told, counts = played(running, NEWEST, "preferences")
    assert counts["forward_backward"] == 2 * STEPS, (
        "log-probabilities, then the gradient of the client's loss"
    )
    losses = column(told["steps"], "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=TOLERANCE), "at first, the policy is the reference"
    assert all(one > other for one, other in pairwise(losses))
    assert column(told["steps"], "accuracy")[1:] == [1.0] * (STEPS - 1)


def test_a_model_learns_from_another_one(running: TinkerStack) -> None:
    told, _ = played(running, NEWEST, "distillation")
    distances = column(told["steps"], "teacher_kl")
    assert len(distances) == STEPS
    assert abs(mean(distances[-2:])) < distances[0] / 2
