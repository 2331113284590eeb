"""The values of commands are those of a plain torch model, of each model alone, and of a trainer that is not
killed."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_queue.contract.packed_tokens import Logprobs
from rollout_queue.trainer_commands import (
    Command,
    CommandFailed,
    Datum,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Passed,
    Published,
    Result,
    Saved,
    SaveForSampler,
    SaveWeights,
    Stepped,
)
from tests.support.long_cases import cases, in_turn
from tests.support.tolerances import ulps
from tests.support.trainer_service.command_harness import (
    FULL,
    CommandHarness,
    MakeCommandHarness,
    created,
    datum,
    learn,
    random_datum,
    step,
)
from tests.support.trainer_service.command_log import Killed, MemoryCommandLog
from tests.support.trainer_service.peft_models import peft_model
from tests.support.trainer_service.same_training import Weights, assert_moved_alike, differs_by
from trainer_service.algorithms.summed_losses import SUMMED_LOSSES, chosen_loss

pytestmark = pytest.mark.numeric
EXACT = 1e-5
"""How far log-probabilities may be from those of a plain model, in nats: the interface's own bound."""
CONFIG: dict[str, dict[str, float | str]] = {"dro": {"beta": 0.3}}


class PlainModel:
    """The base model as transformers loads it, and torch's AdamW."""

    def __init__(self, model_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.optimizer: torch.optim.AdamW | None = None

    def logprobs(self, datum: Datum) -> Tensor:
        """[N, K]."""
        logits_NV = self.model(torch.tensor([list(datum.tokens)])).logits[0]
        targets_NK = torch.tensor(list(datum.targets)).view(len(datum), datum.k)
        return torch.log_softmax(logits_NV, -1).gather(1, targets_NK)

    def backward(self, name: str, data: Sequence[Datum]) -> tuple[list[Tensor], float]:
        """Adds the gradient; returns the log-probabilities and the loss."""
        found, total = [], 0.0
        loss = chosen_loss(name, CONFIG.get(name, {}))
        for each in data:
            lp_NK = self.logprobs(each)
            numbers = {of: torch.tensor(list(each.numbers[of])).view(lp_NK.shape) for of in loss.inputs}
            own = loss.losses(lp_NK, numbers, torch.zeros(len(each), dtype=torch.int64)).sum()
            own.backward()  # type: ignore[no-untyped-call]
            found.append(lp_NK.detach())
            total += own.item()
        return found, total

    def step(self, rates: OptimStep) -> float:
        betas = rates.beta1, rates.beta2
        given: dict[str, Any] = {"lr": rates.learning_rate, "betas": betas, "eps": rates.eps}
        given["weight_decay"] = rates.weight_decay
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **given)
        for group in self.optimizer.param_groups:
            group.update(given)
        limit = rates.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def weights(self) -> Weights:
        state: Mapping[str, Tensor] = self.model.state_dict()
        return {name: value.clone() for name, value in state.items() if name != "lm_head.weight"}


def same(found: Sequence[Logprobs], wanted: Sequence[Tensor]) -> None:
    for mine, plain in zip(found, wanted, strict=True):
        assert torch.tensor(list(mine)).view(plain.shape) == pytest.approx(plain, abs=EXACT)


@pytest.mark.parametrize(("name", "stage"), in_turn(list(SUMMED_LOSSES), [0, 1, 2]))
def test_passes_and_steps_are_those_of_a_plain_model(
    make_command_harness: MakeCommandHarness, model_path: Path, name: str, stage: int
) -> None:
    """Each step has its own settings. An epsilon of 1 makes a step nearly one of gradient descent: there,
    rounding has a bound."""
    harness, plain = make_command_harness(zero_stage=stage), PlainModel(model_path)
    before = plain.weights()
    harness.send("m", FULL)
    names, k = SUMMED_LOSSES[name].inputs, 3 if SUMMED_LOSSES[name].soft else 1
    for turn, rates in enumerate(
        (
            step(0.05, eps=1.0),
            step(0.02, eps=0.5, beta1=0.5, beta2=0.9, weight_decay=0.1),
            step(0.05, eps=1.0, grad_clip_norm=0.5),
        )
    ):
        for part in range(1 if turn else 2):
            data = tuple(random_datum(10 * turn + 3 * part + at, names, 5 + at, k) for at in range(3))
            passed = harness.passed("m", ForwardBackward(name, CONFIG.get(name, {}), data))
            wanted, loss = plain.backward(name, data)
            same(passed.logprobs, wanted)
            assert passed.k == k
            assert passed.metrics["loss:sum"] == pytest.approx(loss, abs=EXACT * sum(map(len, data)) * k)
        stepped = harness.send("m", rates)
        assert isinstance(stepped, Stepped)
        assert stepped.metrics["grad_norm"] == pytest.approx(plain.step(rates), rel=ulps(512))
    assert_moved_alike(harness.weights("m"), plain.weights(), before)


SHAPES: dict[str, dict[str, bool]] = {
    "all": {},
    "no head": {"train_unembed": False},
    "head": {"train_mlp": False, "train_attn": False},
    "attention": {"train_mlp": False, "train_unembed": False},
}
IN_SHORT = [("all", "head", 1), ("no head", "all", 0), ("attention", "head", 2)]
EVERY = [(*pair, stage) for pair in itertools.permutations(SHAPES, 2) for stage in (0, 1, 2)]


@pytest.mark.parametrize(
    ("first", "second", "stage"), cases(IN_SHORT, long=[each for each in EVERY if each not in IN_SHORT])
)
def test_two_models_in_turn_are_what_each_is_alone(
    make_command_harness: MakeCommandHarness, first: str, second: str, stage: int
) -> None:
    """Whatever layers each adapts: the second one adds layers to the base model which the first has not."""

    def commands(seed: int, shape: str) -> list[Any]:
        own = created(rank=2 + seed, seed=seed, **SHAPES[shape])
        return [own, learn(seed), learn(seed + 2, seed + 4), step(), learn(seed + 5), step(0.02, beta1=0.5)]

    scripts = {"one": commands(1, first), "two": commands(2, second)}
    together = make_command_harness("together", zero_stage=stage)
    results: dict[str, list[Any]] = {"one": [], "two": []}
    for both in zip(*scripts.values(), strict=True):
        for model_id, command in zip(scripts, both, strict=True):
            results[model_id].append(together.send(model_id, command))
    for model_id, script in scripts.items():
        alone = make_command_harness(model_id, zero_stage=stage)
        assert [alone.send(model_id, command) for command in script] == results[model_id]
        weights = alone.weights(model_id)
        assert any(bool(value.any()) for name, value in weights.items() if "lora_B" in name)
        assert differs_by(together.weights(model_id), weights) == 0


def test_a_published_adapter_gives_the_log_probabilities_that_were_returned(
    make_command_harness: MakeCommandHarness, model_path: Path
) -> None:
    harness = make_command_harness()
    for command in (created(), learn(1, 2), step(0.1)):
        harness.send("user:train:0", command)
    passed = harness.passed("user:train:0", learn(1, 2, forward_only=True))
    harness.send("user:train:0", SaveForSampler("first"))
    (adapter,) = harness.adapters
    store, _ = harness.store_of(adapter.name)
    plain = PlainModel(model_path)
    untrained = [plain.logprobs(each) for each in learn(1, 2).data]
    plain.model = peft_model(model_path, store.path_of(1))
    same(passed.logprobs, [plain.logprobs(each).detach() for each in learn(1, 2).data])
    assert torch.tensor(list(passed.logprobs[0])) != pytest.approx(untrained[0].detach()[:, 0], abs=0.01)


def test_a_custom_loss_is_cross_entropy_with_its_gradient(
    make_command_harness: MakeCommandHarness,
) -> None:
    """The client evaluates its loss on returned log-probabilities, and sends -d loss / d lp as weights. Here
    the loss is importance sampling, so the step must be that of the trainer's own."""
    names = ("logprobs", "advantages")
    data = tuple(random_datum(seed, names) for seed in range(3))
    own, custom = make_command_harness("own"), make_command_harness("custom")
    for harness in (own, custom):
        harness.send("m", created())
        harness.send("m", learn(7))
        harness.send("m", step(0.1, eps=1.0))
    before = own.weights("m")
    own.send("m", ForwardBackward("importance_sampling", {}, data))
    zeros = tuple(datum(each.tokens, each.targets, weights=[0.0] * len(each)) for each in data)
    first = custom.passed("m", ForwardBackward("cross_entropy", {}, zeros, forward_only=True))
    second = []
    for each, logprobs in zip(data, first.logprobs, strict=True):
        lp = torch.tensor(list(logprobs), requires_grad=True)
        ratios = torch.exp(lp - torch.tensor(list(each.numbers["logprobs"])))
        (gradient,) = torch.autograd.grad(
            -(ratios * torch.tensor(list(each.numbers["advantages"]))).sum(), lp
        )
        second.append(datum(each.tokens, each.targets, weights=(-gradient).tolist()))
    custom.send("m", ForwardBackward("cross_entropy", {}, tuple(second)))
    rates = step(0.1, eps=1.0)
    for harness in (own, custom):
        assert isinstance(harness.send("m", rates), Stepped)
    assert_moved_alike(custom.weights("m"), own.weights("m"), before)


def test_without_a_gradient_nothing_changes(
    make_command_harness: MakeCommandHarness,
) -> None:
    harness, other = make_command_harness("one"), make_command_harness("other")
    for each in (harness, other):
        each.send("m", created())
        each.send("m", learn(1))
    harness.passed("m", learn(2, 3, forward_only=True))
    assert harness.send("m", step()) == other.send("m", step())
    assert harness.send("m", step(1.0, weight_decay=0.5)) == Stepped({"grad_norm": 0.0})
    passed = harness.passed("m", learn(2, 3, forward_only=True))
    assert passed == other.passed("m", learn(2, 3)), "the same values as with a backward pass"
    harness.send("m", learn(2, 3))
    assert harness.send("m", step()) == other.send("m", step())


@pytest.mark.parametrize("stage", cases([2], long=[0, 1]))
def test_a_gradient_that_is_not_finite_is_dropped(
    make_command_harness: MakeCommandHarness, stage: int
) -> None:
    harness, other = (make_command_harness(name, zero_stage=stage) for name in ("one", "other"))
    wild = datum([1, 2], [2, 3], logprobs=[-3e38, -1.0], advantages=[1.0, 1.0])
    last = []
    for each in (harness, other):
        each.make_step("m")
        if each is harness:
            assert isinstance(each.send("m", ForwardBackward("importance_sampling", {}, (wild,))), Passed)
            failed = each.send("m", step())
            assert isinstance(failed, CommandFailed)
            assert "not finite" in failed.error or "inf" in failed.error
        last.append([each.send("m", learn(2)), each.send("m", step())])
    assert last[0] == last[1]


REFUSED: dict[str, tuple[Command, str]] = {
    "loss": (ForwardBackward("huber", {}, (random_datum(1),)), "loss huber is not offered"),
    "unpublished": (ForwardBackward("stable_reinforce", {}, (random_datum(1),)), "`ppo`"),
    "setting": (ForwardBackward("cross_entropy", {"x": 1.0}, (random_datum(1),)), "no setting `x`"),
    "input": (ForwardBackward("ppo", {}, (random_datum(1),)), "needs `logprobs`, `advantages`"),
    "nothing": (ForwardBackward("cross_entropy", {}, ()), "no datums"),
    "token": (
        ForwardBackward("cross_entropy", {}, (random_datum(1), datum([1, 9999], [1, 2], weights=[1, 1]))),
        "datum 1 has token 9999",
    ),
    "target": (
        ForwardBackward("cross_entropy", {}, (datum([1, 2], [1, -1], weights=[1, 1]),)),
        "datum 0 has target -1",
    ),
    "long": (ForwardBackward("cross_entropy", {}, (random_datum(1, length=60),)), "60 tokens; at most 50"),
    "kinds": (
        ForwardBackward("cross_entropy", {}, (random_datum(1), random_datum(2, k=2))),
        "1, 2 targets for each position",
    ),
    "mask": (
        ForwardBackward(
            "gspo",
            {},
            (datum([1], [2], logprobs=[-1.0], advantages=[1.0], sequence_ratio_mask=[0.5]),),
        ),
        "must be 0 or 1",
    ),
    "rate": (step(-1.0), "learning_rate must be a finite number of at least 0"),
    "beta": (step(beta1=1.0), "beta1 must be at least 0 and below 1"),
    "again": (created(), "there is a model m already"),
    "name": (SaveWeights("a/b"), "'a/b' is no name"),
    "missing": (LoadWeights("m", "nothing", True), "m has no checkpoint nothing"),
}


def test_commands_that_are_refused_change_nothing(make_command_harness: MakeCommandHarness) -> None:
    harness, other = (make_command_harness(name, algorithm={"max_row_tokens": 50}) for name in "ab")
    last = []
    for each in (harness, other):
        for before in (created(), learn(1), step(), learn(2)):
            each.send("m", before)
        for case, (command, sentence) in REFUSED.items():
            if each is harness:
                failed = each.send("m", command)
                assert isinstance(failed, CommandFailed), case
                assert failed.category == "user", case
                assert sentence in failed.error, case
        last.append([each.send("m", step()), each.send("m", learn(3))])
    assert last[0] == last[1]


SCRIPT: Sequence[tuple[str, Command]] = [
    ("a", created(rank=4, seed=1)),
    ("a", learn(1)),
    ("b", created(rank=2, seed=2)),
    ("a", learn(2)),
    ("b", learn(3)),
    ("a", step()),
    ("a", SaveWeights("x")),
    ("c", LoadWeights("a", "x", True)),
    ("b", step()),
    ("c", learn(12)),
    ("a", learn(4)),
    ("b", LoadWeights("a", "missing", True)),
    ("b", learn(5, forward_only=True)),
    ("a", SaveForSampler("s")),
    ("b", learn(6)),
    ("a", step(0.02, beta1=0.5)),
    ("a", SaveWeights("x", overwrite=True)),
    ("c", LoadWeights("a", "x", True)),
    ("a", learn(7)),
    ("c", learn(8)),
    ("b", step(0.03)),
    ("c", step()),
    ("a", LoadWeights("a", "x", True)),
    ("a", learn(9)),
    ("b", learn(10)),
    ("a", step()),
    ("c", SaveForSampler("t")),
    ("a", SaveForSampler("s2")),
    ("c", LoadWeights("a", "x", False)),
    ("c", learn(11)),
    ("c", step()),
]
MODELS = ("a", "b", "c")
Outcome = tuple[list[Result], list[torch.Tensor]]


def written() -> tuple[MemoryCommandLog, list[str]]:
    """A log with all commands, and their request ids."""
    log = MemoryCommandLog()
    return log, [log.append(model_id, command) for model_id, command in SCRIPT]


def finished(harness: CommandHarness) -> CommandHarness:
    while not harness.is_idle:
        harness.trainer.run_once()
    return harness


def outcome(harness: CommandHarness, request_ids: Sequence[str]) -> Outcome:
    """The results, with paths and sizes left out, and the weights."""
    results = [_without_place(harness.log.last(each)) for each in request_ids]
    return results, [value for each in MODELS for value in harness.weights(each).values()]


def _without_place(result: Result) -> Result:
    match result:
        case Published(policy, version):
            return Published(policy, version, "")
        case Saved():
            return Saved(0)
    return result


SETTINGS: dict[str, dict[str, int]] = {  # when checkpoints are made
    "every-second-step": {"checkpoint_every_steps": 2},
    "when-it-frees": {"log": 1},
    "never": {"zero_stage": 0},
}
KILLS_IN_SHORT = {("every-second-step", 6), ("every-second-step", 23), ("when-it-frees", 13), ("never", 16)}
"""Before the answer to weights that are saved, loaded, published, and saved again. The long run has all."""
KILLS = [
    pytest.param(case, answers, marks=() if (case, answers) in KILLS_IN_SHORT else pytest.mark.long)
    for case in SETTINGS
    for answers in range(len(SCRIPT))
]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[int, Outcome]:
    """By the stage of ZeRO. When checkpoints are made changes nothing."""
    return {}


def assert_as_uninterrupted(
    make_command_harness: MakeCommandHarness,
    uninterrupted: dict[int, Outcome],
    kills: Sequence[int],
    settings: dict[str, int],
) -> None:
    """Kill a trainer after so many answers, and the next one after so many of its own. A last one ends."""
    settings = dict(settings)
    log, request_ids = written()
    log.bytes = (900 * settings.pop("log", 0), 1000)
    stage = settings.get("zero_stage", 1)
    if stage not in uninterrupted:
        whole = finished(make_command_harness("whole", written()[0], zero_stage=stage))
        assert [(each.name, each.version) for each in whole.adapters] == [("a", 1), ("c", 1), ("a", 2)]
        uninterrupted[stage] = outcome(whole, request_ids)
    for answers in kills:
        log.answers_until_killed = answers
        with pytest.raises(Killed):
            finished(make_command_harness("killed", log, **settings))
    log.answers_until_killed = None
    after = finished(make_command_harness("killed", log, **settings))
    _assert_same(outcome(after, request_ids), uninterrupted[stage])


@pytest.mark.parametrize(("case", "answers"), KILLS)
def test_a_kill_before_any_answer_changes_nothing(
    make_command_harness: MakeCommandHarness, uninterrupted: dict[int, Outcome], case: str, answers: int
) -> None:
    assert_as_uninterrupted(make_command_harness, uninterrupted, [answers], SETTINGS[case])


@pytest.mark.parametrize(
    ("first", "second"),
    cases([(20, 5)], long=[(a, b) for a in (10, 15, 20, 25, 29) for b in (1, 2, 3, 5) if (a, b) != (20, 5)]),
)
def test_a_second_kill_while_commands_are_carried_out_again_changes_nothing(
    make_command_harness: MakeCommandHarness, uninterrupted: dict[int, Outcome], first: int, second: int
) -> None:
    assert_as_uninterrupted(make_command_harness, uninterrupted, [first, second], SETTINGS["when-it-frees"])


def _assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1])
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
