"""Every recipe in a trainer: each advantage, loss and preset trains, by configuration alone."""

import contextlib
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from rollout_queue.contract.packed_tokens import Logprobs
from rollout_queue.contract.records import Reward, Turn
from tests.support.queue.memory_stream import MemoryStream
from tests.support.tolerances import ulps
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.made_rows import rows_of
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    same_metrics,
)
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.settings import PRESETS, AlgorithmSettings
from trainer_service.algorithms.turn_losses import Ppo, Sapo
from trainer_service.rows.rows import micro_batches
from trainer_service.settings import TrainerSettings

ADVANTAGES: dict[str, Any] = {
    "drgrpo": "drgrpo",
    "grpo_ddof1": "grpo_ddof1",
    "grpo_ddof0": "grpo_ddof0",
    "rloo": "rloo",
    "liteppo": "liteppo",
    "opo": "opo",
    "gpg": "gpg",
    "maxrl": "maxrl",
    "passk": "passk",
    "gdpo": {"name": "gdpo", "weights": {"right": 1.0, "short": 0.5}},
    "rae": "rae",
    "reinforce_pp_baseline": "reinforce_pp_baseline",
    "reinforce_pp": {"name": "reinforce_pp", "gamma": 0.9},
}
LOSSES: dict[str, Any] = {
    "ppo": "ppo",
    "gspo": "gspo",
    "gmpo": "gmpo",
    "cispo": "cispo",
    "reinforce": "reinforce",
    "importance_sampling": {"name": "importance_sampling", "anchor": "prox"},
    "sapo": "sapo",
    "dppo": {"name": "dppo", "anchor": "prox"},
    "ipo": {"name": "ipo", "anchor": "prox"},
    "glm5": {"name": "glm5", "anchor": "prox"},
    "dro": {"name": "dro", "beta": 0.1, "anchor": "prox"},
    "kl_cov": "kl_cov",
}
GENTLE = {"lr": 1e-3, "warmup_steps": 0}
"""A small learning rate. A policy that moves far from the invented logprobs would alarm the guards."""
ROUNDED = ulps(4, of=2.0)
"""The rounding of whitened float32 advantages of four tokens, none larger than 2."""
PRESET_NAMES = sorted(PRESETS)
MOVING = {"estimator": "k2", "coefficient": 0.1, "reference_every_steps": 2}


def task(harness: Harness, name: str, values: list[float]) -> None:
    """A group whose rewards come in two parts, `right` and `short`."""
    for index, value in enumerate(values):
        session_id = f"{name}-{index}"
        harness.agents.open(session_id, name, len(values))
        output = [10 + index, 20 + index, *[30] * index, 1]
        harness.agents.call(*honest(harness, turn(session_id, f"{session_id}-t", output_ids=output)))
        for part, worth in (("right", value), ("short", 0.1 * index)):
            reward = Reward(session_id=session_id, value=worth, key=part, source=part, created_at=102.0)
            harness.agents.rewarded(reward)
        harness.agents.finish(session_id)


def honest(harness: Harness, *turns: Turn) -> list[Turn]:
    """The same turns with the log-probabilities that the policy itself gives their tokens."""
    told = []
    for each in turns:
        (batch,) = micro_batches(rows_of(each.session_id, [each], [each.turn_id]), 100)
        lp_T, _ = harness.policy.logprobs(batch)
        told.append(msgspec.structs.replace(each, logprobs=Logprobs(lp_T.tolist())))
    return told


def moved(harness: Harness, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(before[name], weight) for name, weight in harness.weights().items())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_trains(name: str, make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"advantage": ADVANTAGES[name]}).start()
    before = harness.weights()
    task(harness, "g", [1.0, 0.0, 0.5])
    task(harness, "h", [0.0, 1.0])
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}
    assert moved(harness, before)
    metrics = harness.told
    assert metrics["adv/std"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains(name: str, make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"loss": LOSSES[name], "epochs": 2}).start()
    before = harness.weights()
    task(harness, "g", [1.0, 0.0, 0.5])
    assert harness.trainer.run_once()
    assert moved(harness, before)


class FakeTeacher:
    """A teacher's `/generate` that gives every token the log-probability `lp`."""

    def __init__(self, lp: float = -0.1, away: int = 0, refuses: str | None = None) -> None:
        self.lp, self.away, self.refuses = lp, away, refuses
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        asked = httpx.Response(200, content=request.content).json()
        self.asked.append(asked)
        if self.away:
            self.away -= 1
            return httpx.Response(503)
        if self.refuses is not None and int(self.refuses) in asked["input_ids"]:
            return httpx.Response(400, text="too long")
        start, ids = asked["logprob_start_len"], asked["input_ids"]
        told = [[None, ids[start], None], *([self.lp, token, None] for token in ids[start + 1 :])]
        return httpx.Response(200, json={"meta_info": {"input_token_logprobs": told}})


def with_teacher(make_harness: MakeHarness, teacher: FakeTeacher) -> Harness:
    harness = make_harness(algorithm={"preset": "opd"}, teacher={"url": "http://teacher"}, optimizer=GENTLE)
    harness.teacher = teacher
    return harness.start()


@pytest.mark.parametrize("preset", [name for name in PRESET_NAMES if name != "opd"])
def test_every_preset_trains_three_steps_without_a_warning(
    preset: str, make_harness: MakeHarness, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="trainer_service")
        # The garbage collector may find a resource of an earlier test here.
        warnings.filterwarnings("default", category=ResourceWarning)
        harness = make_harness(algorithm={"preset": preset}, optimizer=GENTLE).start()
        for step in range(3):
            task(harness, f"g{step}", [1.0, 0.0, 0.5])
            before = harness.weights()
            assert harness.trainer.run_once()
            assert moved(harness, before)
    assert harness.trainer.step == 3
    assert set(harness.session_codes().values()) == {"trained"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_distillation_moves_towards_the_teacher(make_harness: MakeHarness) -> None:
    """The rewards do not matter: only the teacher judges. The trainer waits for one that is away."""
    teacher = FakeTeacher(away=3)
    harness = with_teacher(make_harness, teacher)
    losses = []
    for step in range(3):
        harness.agents.episode(f"s{step}", 0.0)
        harness.agents.episode(f"r{step}", 0.0)
        assert harness.trainer.run_once()
        losses.append(harness.told["mismatch/train_ppl"])
    assert losses[-1] < losses[0]
    assert set(harness.session_codes().values()) == {"trained"}
    assert teacher.asked[0]["logprob_start_len"] == 2  # one before the first sampled token


def test_a_session_that_the_teacher_refuses_ends_alone(make_harness: MakeHarness) -> None:
    harness = with_teacher(make_harness, FakeTeacher(refuses="63"))
    harness.agents.episode("bad", 0.0, output_ids=[63, 1])
    harness.agents.episode("worse", 0.0, group_id="h", size=2, output_ids=[63, 2])
    harness.agents.episode("well", 0.0, group_id="h", size=2, output_ids=[5, 1])
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"bad": "invalid", "worse": "invalid", "well": "trained"}
    assert harness.verdict("worse").detail == "the teacher: too long"


@pytest.mark.parametrize("nonsense", [None, [[None, 2, None], None, None, None], "text"], ids=str)
def test_a_teacher_that_talks_nonsense_stops_no_trainer(nonsense: Any, make_harness: MakeHarness) -> None:
    """An invalid answer is asked for again. A session for which a token's logprob is missing is invalid."""
    answers = [nonsense]

    def confused(request: httpx.Request) -> httpx.Response:
        if answers:
            return httpx.Response(200, json={"meta_info": {"input_token_logprobs": answers.pop()}})
        return FakeTeacher()(request)

    harness = make_harness(
        algorithm={"preset": "opd", "min_live_rows": 1}, teacher={"url": "http://t", "concurrency": 1}
    )
    harness.teacher = confused
    harness.start()
    harness.agents.episode("a", 0.0)
    while not harness.session_codes()["a"]:
        harness.trainer.run_once()
    assert harness.session_codes()["a"] == ("invalid" if isinstance(nonsense, list) else "trained")


def test_a_reward_that_a_formula_does_not_allow_ends_only_its_session(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"advantage": "maxrl"}).start()
    harness.agents.group("g", [1.0, -1.0, 0.0])
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"g-0": "trained", "g-1": "invalid", "g-2": "trained"}
    assert "maxrl takes no reward below 0" in harness.verdict("g-1").detail


def test_huge_rewards_with_a_sum_of_0_stop_no_trainer(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"advantage": {"name": "gdpo", "weights": {"x": 1.0}}}).start()
    harness.agents.open("bad")
    harness.agents.call(turn("bad", "bad-t"))
    for index, value in enumerate((1e308, -1e308, 1e308, -1e308)):
        source = "xy"[index % 2]
        harness.stream.append(  # no gateway stores the second one
            Reward(session_id="bad", value=value, key=str(index), source=source, created_at=102.0)
        )
    harness.agents.finish("bad")
    task(harness, "g", [1.0, 0.0])
    with contextlib.suppress(AssertionError):
        assert harness.trainer.run_once()
    assert harness.session_codes()["bad"] == "invalid"


def test_a_group_in_which_nobody_has_an_advantage_ends_at_once(make_harness: MakeHarness) -> None:
    """With pass@k and two best members, no member has an advantage."""
    harness = make_harness(algorithm={"advantage": "passk"}).start()
    harness.agents.group("g", [1.0, 1.0, 0.0])
    assert not harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"zero_advantage"}


def test_shaping_changes_the_rewards_of_tokens(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {
        "advantage": {"name": "reinforce_pp", "gamma": 1.0},
        "shaping": {"overlong": {"max_len": 4, "cache": 2}},
    }
    harness = make_harness(algorithm=algorithm).start()
    harness.agents.episode("short", 1.0, output_ids=[10])
    harness.agents.episode("long", 1.0, output_ids=[10, 11, 12])
    seen = sorted(advantages_of(harness, monkeypatch))
    assert seen == pytest.approx(sorted(whitened([1.0, 0.5, 0.5, 0.5])), abs=ROUNDED)


def test_the_reference_stays_the_untrained_model(make_harness: MakeHarness) -> None:
    """The same holds after a restart."""
    harness = make_harness(
        algorithm={"kl": {"estimator": "k2", "coefficient": 1e-3}}, optimizer=GENTLE
    ).start()
    said = []
    for step in range(3):
        task(harness, f"g{step}", [1.0, 0.0, 0.5])
        assert harness.trainer.run_once()
        said.append(harness.told["kl/reference"])
        harness = harness.restart()
    assert said[0] == 0.0
    assert 0.0 < said[1] < said[2]


def test_interpolated_logprobs_do_not_hide_a_mismatch(make_harness: MakeHarness) -> None:
    said = []
    for preset in ("default", "areal"):
        harness = make_harness(preset, algorithm={"preset": preset, "masks": []}).start()
        harness.step("g")
        said.append(harness.told["mismatch/abs_logp"])
    assert said[0] == pytest.approx(said[1])
    assert said[0] > 0.01


def test_rae_compares_a_lone_session_with_its_agents_average(make_harness: MakeHarness) -> None:
    """The checkpoint holds the average, so that a restart continues with it."""
    harness = make_harness(algorithm={"advantage": {"name": "rae", "decay": 0.5}, "min_live_rows": 1}).start()
    harness.agents.episode("a", 1.0)
    assert harness.trainer.run_once()
    assert harness.told["adv/mean"] == pytest.approx(1.0)
    again = harness.restart()
    again.agents.episode("b", 1.0)
    assert again.trainer.run_once()
    assert again.told["adv/mean"] == pytest.approx(0.5)


def two_turns(harness: Harness, session_id: str, first: float | None, last: float) -> None:
    harness.agents.open(session_id)
    harness.agents.call(
        turn(session_id, f"{session_id}-1", output_ids=[10, 1], started_at=100.0),
        turn(
            session_id, f"{session_id}-2", parent_id=f"{session_id}-1", output_ids=[11, 1], started_at=101.0
        ),
    )
    if first is not None:
        harness.agents.reward(session_id, first, key="turn", turn_id=f"{session_id}-1")
    harness.agents.finish(session_id, last)


def advantages_of(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The advantages of all tokens that the loss receives in one step."""
    seen: list[float] = []

    def spied(tokens: Any, *rest: Any) -> Any:
        seen.extend(tokens.advantages_T.tolist())
        return policy_loss(tokens, *rest)

    monkeypatch.setattr("trainer_service.step.optimizer_step.policy_loss", spied)
    assert harness.trainer.run_once()
    return seen


def whitened(values: list[float]) -> list[float]:
    values_T = torch.tensor(values, dtype=torch.float64)
    return ((values_T - values_T.mean()) / values_T.std()).tolist()


@pytest.mark.parametrize(
    ("shaping", "first", "last", "credited"),
    [
        ({}, 2.0, 1.0, [3.0, 3.0, 1.0, 1.0]),
        ({}, 1.0, -1.0, [0.0, 0.0, -1.0, -1.0]),
        ({"turn_discount": 0.5}, None, 1.0, [0.5, 0.5, 1.0, 1.0]),
    ],
    ids=["whole", "also where rewards cancel", "in part, with a discount"],
)
def test_a_turns_reward_is_credited_to_the_turn_and_to_earlier_turns(
    make_harness: MakeHarness,
    monkeypatch: pytest.MonkeyPatch,
    shaping: dict[str, float],
    first: float | None,
    last: float,
    credited: list[float],
) -> None:
    advantage = {"name": "reinforce_pp", "gamma": 1.0}
    harness = make_harness(algorithm={"advantage": advantage, "shaping": shaping, "min_live_rows": 1}).start()
    two_turns(harness, "a", first, last)
    assert advantages_of(harness, monkeypatch) == pytest.approx(whitened(credited), abs=ROUNDED)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "kl_cov", "epochs": 2},
        {"correction": {"name": "tis_token", "normalise": True}},
        {"masks": ["m2po"]},
        {"advantage": {"name": "reinforce_pp", "gamma": 0.9}},
        {"kl": {"estimator": "k2", "coefficient": 0.1}, "epochs": 2},
        {"aggregation": {"mode": "rollout_mean"}},
    ],
    ids=str,
)
def test_packs_change_nothing(
    algorithm: dict[str, Any], make_harness: MakeHarness, untrained: Weights
) -> None:
    """Weights and metrics stay equal, even if a statistic of the whole step is part of the loss."""
    ends = []
    for max_tokens in (1, 10_000):
        harness = make_harness(
            f"run-{max_tokens}",
            stream=MemoryStream(),
            algorithm=algorithm | {"max_tokens": max_tokens},
            optimizer=WELL_CONDITIONED,
        ).start()
        task(harness, "g", [1.0, 0.0, 0.5])
        task(harness, "h", [0.0, 1.0])
        assert harness.trainer.run_once()
        ends.append((harness.weights(), harness.told))
    (one, said), (other, also_said) = ends
    assert_moved_alike(one, other, untrained)
    names = ("loss", "grad_norm", "adv/std", "is/mean", "mismatch/kl", "kl/reference")
    assert {name: said[name] for name in names} == same_metrics({name: also_said[name] for name in names})


def test_a_length_penalty_gives_equal_rewards_an_advantage(make_harness: MakeHarness) -> None:
    shaping = {"length_penalty": {"output_tokens": 0.5}}
    harness = make_harness(algorithm={"shaping": shaping}).start()
    for index in range(2):
        harness.agents.episode(
            f"s{index}", 1.0, group_id="g", size=2, output_ids=[10] * (1 + 3 * index) + [1]
        )
    assert harness.trainer.run_once()


def test_truncated_sessions_train_only_if_configured(make_harness: MakeHarness) -> None:
    for truncated, codes in (("mask", "truncated"), ("keep", "trained"), ("zero", "trained")):
        harness = make_harness(truncated, algorithm={"shaping": {"truncated": truncated}}).start()
        harness.agents.group("g", [1.0, 0.0])
        harness.agents.open("cut", "h", 3)
        harness.agents.call(turn("cut", "cut-t"))
        harness.agents.finish("cut", 1.0, status="truncated")
        harness.agents.episode("x", 1.0, group_id="h", size=3, output_ids=[12, 1])
        harness.agents.episode("y", 0.5, group_id="h", size=3, output_ids=[13, 1])
        assert harness.trainer.run_once()
        assert harness.session_codes()["cut"] == codes


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"preset": "unheard"}, "unknown preset 'unheard'; known are areal"),
        ({"advantag": "grpo_ddof1"}, "advantag"),
        ({"loss": "dppo"}, "would correct for it a second time"),
        ({"prox": "loglinear", "epochs": 2}, "set prox: recompute"),
        ({"shaping": {"kl_in_reward": 0.1}}, "compares whole rollouts"),
        ({"kl": {"estimator": "k1", "coefficient": 0.1}}, "does not pull to the reference"),
        ({"prox": "loglinear", "mini_batches": 2}, "set prox: recompute"),
        ({"mini_batches": 4, "min_live_rows": 3}, "more than the rows that a step waits for"),
        ({"loss": "kl_cov"}, "set epochs or mini_batches"),
        ({"min_live_rows": 300}, "more than a step holds"),
        ({"stale": "correct", "correction": "none"}, "set a correction, or a loss with anchor: rollout"),
        ({"intake": "oldest", "replay_share": 0.5}, "intake oldest takes the oldest groups anyway"),
        ({"intake": "bounded", "replay_share": 0.5}, "intake bounded takes the oldest groups anyway"),
    ],
    ids=str,
)
def test_contradictory_settings_are_refused_with_a_sentence(algorithm: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AlgorithmSettings.model_validate(algorithm)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"algorithm": {"advantage": "gae"}}, "advantage gae needs a critic; set it"),
        ({"algorithm": {"advantage": "drgrpo"}, "critic": {}}, "advantage drgrpo uses no critic"),
        ({"transport": "adapter"}, r"transport: adapter needs trainer\.lora"),
        ({"algorithm": {"kl": MOVING}, "lora": {}}, r"kl.reference_every_steps: with trainer.lora"),
        ({"memory": "shared", "shared_with": ["http://e"], "zero_stage": 0}, "zero_stage 1 or 2"),
        ({"memory": "shared", "shared_with": ["http://e"], "zero_stage": 3}, "zero_stage 1 or 2"),
        ({"memory": "shared"}, "trainer.shared_with"),
        ({"shared_with": ["http://e"]}, "trainer.memory"),
        ({"zero_stage": 0, "dtype": "bfloat16"}, "bfloat16 needs zero_stage 1, 2 or 3"),
        ({"zero_stage": 0, "offload_optimizer": True}, "offload_optimizer: needs zero_stage"),
        ({"source": "commands", "zero_stage": 3}, "source commands needs stage 0, 1 or 2"),
        ({"source": "commands", "memory": "shared", "shared_with": ["http://e"]}, "commands needs exclusive"),
        ({"source": "commands", "publish_url": "http://t:8200/w"}, "engines find adapters on a shared disk"),
        ({"optimizer": {"schedule": "cosine"}}, "schedule cosine needs total_steps"),
        (
            {"optimizer": {"schedule": "linear", "warmup_steps": 5, "total_steps": 5}},
            "more than warmup_steps",
        ),
        ({"optimizer": {"total_steps": 10}}, "need schedule linear or cosine"),
        ({"optimizer": {"min_lr_ratio": 0.1}}, "need schedule linear or cosine"),
        *(
            ({"publish_url": url}, "publish_url")
            for url in ("s3://", "s3://Bucket/a", "s3://b:9/a", "ftp://a/b")
        ),
        *(({"publish_url": url}, "publish_url") for url in ("s3://key:secret@bucket/a", "s3://bucket/../a")),
        *(
            ({"object_store": {"endpoint_url": url}}, "without credentials")
            for url in ("127.0.0.1:9000", "http://key:secret@store:9000", "s3://bucket")
        ),
    ],
    ids=str,
)
def test_contradictory_settings_of_the_trainer_are_refused_with_a_sentence(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainerSettings(model_path=Path("m"), **settings)


def test_given_fields_override_a_preset() -> None:
    settings = AlgorithmSettings.model_validate({"preset": "dapo", "advantage": "rloo"})
    assert (settings.advantage.name, settings.shaping.truncated) == ("rloo", "keep")
    nested = {"preset": "grpo_classic", "loss": {"clip_low": 0.1}, "correction": "none"}
    loss = AlgorithmSettings.model_validate(nested).loss
    assert loss == Ppo(clip_low=0.1, clip_high=0.2, dual_clip=None, anchor="rollout")
    other = AlgorithmSettings.model_validate({"preset": "grpo_classic", "loss": {"name": "sapo"}}).loss
    assert other == Sapo()


def test_cross_entropy_trains_good_sessions_only_and_makes_their_tokens_more_probable(
    make_harness: MakeHarness,
) -> None:
    loss = {"name": "cross_entropy", "min_reward": 0.5}
    harness = make_harness(algorithm={"loss": loss, "min_live_rows": 1}, optimizer=GENTLE).start()
    perplexities = []
    for step in range(3):
        harness.agents.episode(f"good{step}", 1.0, group_id=f"g{step}", size=2, output_ids=[10, 20, 1])
        harness.agents.episode(f"bad{step}", 0.0, group_id=f"g{step}", size=2, output_ids=[11, 21, 1])
        harness.agents.episode(f"even{step}", 0.5, output_ids=[10, 20, 1])  # alone, and trained all the same
        assert harness.trainer.run_once()
        perplexities.append(harness.told["mismatch/train_ppl"])
    assert perplexities == sorted(perplexities, reverse=True)
    codes = harness.session_codes()
    assert {name.rstrip("012"): code for name, code in codes.items()} == {
        "good": "trained",
        "bad": "zero_advantage",
        "even": "trained",
    }
    assert harness.verdict("bad0").detail == "its reward 0 is below loss.min_reward, 0.5"


def test_kdrl_compares_rewards_and_asks_the_teacher(make_harness: MakeHarness) -> None:
    loss = {"name": "kdrl", "coefficient": 0.1}
    harness = make_harness(algorithm={"loss": loss}, teacher={"url": "http://teacher"}, optimizer=GENTLE)
    harness.teacher = teacher = FakeTeacher()
    harness.start()
    task(harness, "g", [1.0, 0.0, 0.5])
    harness.agents.group("even", [1.0, 1.0])
    assert harness.trainer.run_once()
    assert len(teacher.asked) == 3  # those of the group whose rewards differ
    assert harness.told["adv/std"] > 0
    assert harness.session_codes()["even-0"] == "zero_advantage"
