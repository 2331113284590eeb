"""The program of a TRL user who trains on recorded rows: `play.py FILE steps MODEL`, or `FILE traces`."""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

from datasets import Dataset, load_dataset

FIELDS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
_, file, scene, *models = sys.argv


def steps():
    """One step of GRPO for each group, with the rows in place of a rollout; what the trainer logged."""
    from trl import GRPOConfig, GRPOTrainer

    rows = load_dataset("json", data_files=file, split="train")
    groups = defaultdict(list)
    for row in rows:
        groups[row["group_id"]].append(row)
    given = []

    def recorded(prompts, trainer):
        taken = Counter()
        picked = []
        for group_id in prompts:  # each group id comes num_generations times
            picked.append(groups[group_id][taken[group_id]])
            taken[group_id] += 1
        given.append([row["cursor"] for row in picked])
        return {field: [row[field] for row in picked] for field in FIELDS}

    def recorded_reward(reward, **_):
        return reward

    (size,) = {len(group) for group in groups.values()}
    args = GRPOConfig(
        output_dir=file + "-out",
        per_device_train_batch_size=size,
        num_generations=size,
        max_steps=len(groups),
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        *models,
        recorded_reward,
        args,
        Dataset.from_list([{"prompt": group_id} for group_id in groups]),
        rollout_func=recorded,
    )
    trainer.train()
    told = ("loss", "grad_norm", "reward", "completions/mean_length", "num_tokens")
    logged = [{name: log[name] for name in told} for log in trainer.state.log_history if "loss" in log]
    return {"given": given, "logged": logged}


def traces():
    """OpenEnv's checked traces; the tokens, masks and logprobs of each turn."""
    from openenv.core.harness.training import TrainingTrace

    with Path(file).open() as lines:
        rows = [json.loads(line) for line in lines]
    read = {row["session_id"]: TrainingTrace.model_validate(row["trace"]) for row in rows}
    return {
        session_id: [
            [
                turn.node_id,
                turn.prompt_token_ids,
                turn.completion_token_ids,
                turn.per_token_logps,
                turn.loss_mask,
            ]
            for turn in trace.turns
        ]
        for session_id, trace in read.items()
    }


said = globals()[scene]()
print()  # a progress bar may not end with a newline
print(json.dumps(said))
