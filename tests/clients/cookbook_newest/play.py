"""The program of a user of `tinker-cookbook`: its own training loops, on data of the user's own.

python play.py SCENE   with MODEL, the directory of the base model; prints the metrics of each step
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import chz
import datasets
import tinker
from tinker_cookbook.distillation import train_on_policy as distillation
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = os.environ["MODEL"]
RENDERER = "role_colon"
STEPS, GROUPS, ROLLOUTS, TOKENS = 8, 4, 4, 12
LIKED = 512
"""The environment likes tokens with a smaller id: half of the vocabulary."""
RATE = 0.005
ALWAYS = {"model_name": MODEL, "renderer_name": RENDERER, "lora_rank": 8, "eval_every": 0}


class LikedTokens(Env):
    """One turn. Its reward is the share of the sampled tokens that are liked."""

    def __init__(self, question):
        self.renderer = get_renderer(RENDERER, get_tokenizer(MODEL))
        self.question = question

    async def initial_observation(self):
        messages = [{"role": "user", "content": self.question}]
        return self.renderer.build_generation_prompt(messages), self.renderer.get_stop_sequences()

    async def step(self, action, *, extra=None):
        return StepResult(
            reward=sum(token < LIKED for token in action) / len(action),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
        )


class LikedGroup(EnvGroupBuilder):
    def __init__(self, question):
        self.question = question

    async def make_envs(self):
        return [LikedTokens(self.question) for _ in range(ROLLOUTS)]


class LikedDataset(RLDataset):
    def get_batch(self, index):
        return [LikedGroup(f"question {index}, {each}?") for each in range(GROUPS)]

    def __len__(self):
        return STEPS


@chz.chz
class LikedDatasetBuilder(RLDatasetBuilder):
    async def __call__(self):
        return LikedDataset(), None


def asynchronous(**more):
    return rl.AsyncConfig(max_steps_off_policy=2, groups_per_batch=GROUPS, **more)


NEWEST = hasattr(rl.Config, "training_loss_fn")
"""Whether asynchronous training has a loss of its own, which is `stable_reinforce` if nobody sets it."""
MODES = {
    "synchronous": dict,
    "minibatches": lambda: {
        "stream_minibatch_config": rl.StreamMinibatchConfig(groups_per_batch=GROUPS, num_minibatches=2)
    },
    "ppo": lambda: {"loss_fn": "ppo", "num_substeps": 2, "compute_post_kl": True},
    "penalty": lambda: {
        "kl_penalty_coef": 0.01,
        "kl_reference_config": rl.KLReferenceConfig(base_model=MODEL),
    },
    "asynchronous": lambda: (
        {"async_config": asynchronous(loss_fn="ppo")}
        if NEWEST
        else {"loss_fn": "ppo", "async_config": asynchronous()}
    ),
    "unset": lambda: {"async_config": asynchronous()},
}


def metrics_of(log):
    lines = (Path(log) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def reinforce(log, **more):
    settings = {"loss_fn": "importance_sampling", **more}
    if "async_config" in more and NEWEST:
        del settings["loss_fn"]
    config = rl.Config(
        learning_rate=RATE,
        dataset_builder=LikedDatasetBuilder(),
        recipe_name="liked_tokens",
        max_tokens=TOKENS,
        log_path=str(log),
        save_every=4,
        **ALWAYS,
        **settings,
    )
    try:
        asyncio.run(rl.main(config))
    except tinker.TinkerError as error:
        return {"error": str(error)}
    return {"steps": metrics_of(log)}


def resumed(log):
    """A run that stops half-way, and one that goes on from what it saved."""
    half = reinforce(log, max_steps=STEPS // 2)
    return {"half": half["steps"], "steps": reinforce(log)["steps"]}


def data(batch):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name=RENDERER, max_length=64, batch_size=batch
    )


def said(text):
    return [{"role": "assistant", "content": text}]


ASKED = [{"role": "user", "content": "say it"}]


def supervise(log):
    """The model learns one answer by heart."""
    log.mkdir(exist_ok=True)
    conversations = log / "conversations.jsonl"
    line = json.dumps({"messages": ASKED + said("seven three nine")})
    conversations.write_text("\n".join([line] * STEPS * GROUPS), encoding="utf-8")
    config = supervised.Config(
        log_path=str(log / "run"),
        recipe_name="one_answer",
        dataset_builder=FromConversationFileBuilder(common_config=data(GROUPS), file_path=str(conversations)),
        learning_rate=RATE,
        lr_schedule="constant",
        save_every=0,
        **ALWAYS,
    )
    asyncio.run(supervised.main(config))
    return {"steps": metrics_of(log / "run")}


@chz.chz
class OneComparison(ComparisonDatasetBuilder):
    def get_train_and_test_datasets(self):
        return datasets.Dataset.from_list([{"number": each} for each in range(STEPS * 10)]), None

    def example_to_labeled_comparison(self, example):
        comparison = Comparison(
            prompt_conversation=ASKED, completion_A=said("seven three"), completion_B=said("one two four")
        )
        return LabeledComparison(comparison=comparison, label="A")


def prefer(log):
    """DPO: one answer is preferred to another."""
    pairs = DPODatasetBuilderFromComparisons(common_config=data(10), comparison_builder=OneComparison())
    config = train_dpo.Config(
        log_path=str(log),
        recipe_name="one_comparison",
        dataset_builder=pairs,
        learning_rate=RATE,
        dpo_beta=0.1,
        save_every=0,
        **ALWAYS,
    )
    train_dpo.main(config)
    return {"steps": metrics_of(log)}


def distil(log):
    """A model that has learned to like tokens teaches a fresh one, which samples for itself."""
    reinforce(log / "teacher")
    saved = (log / "teacher" / "checkpoints.jsonl").read_text(encoding="utf-8").splitlines()
    teacher = TeacherConfig(base_model=MODEL, load_checkpoint_path=json.loads(saved[-1])["sampler_path"])
    lessons = DistillationDatasetConfig(
        dataset_builder=LikedDatasetBuilder(), teacher_config=teacher, groups_per_batch=GROUPS
    )
    config = distillation.Config(
        log_path=str(log / "student"),
        recipe_name="distillation",
        dataset_configs=[lessons],
        learning_rate=RATE,
        max_tokens=TOKENS,
        save_every=0,
        **ALWAYS,
    )
    asyncio.run(distillation.main(config))
    return {"steps": metrics_of(log / "student")}


OTHERS = {"resumed": resumed, "supervised": supervise, "preferences": prefer, "distillation": distil}


if __name__ == "__main__":
    scene = sys.argv[1]
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory)
        told = OTHERS[scene](run) if scene in OTHERS else reinforce(run, **MODES[scene]())
    print(json.dumps(told))
