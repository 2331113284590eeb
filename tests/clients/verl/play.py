"""The program of a verl user: recorded rows become agent loop outputs, a batch, and advantages by group."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

TENSORS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")


def batch(file):
    """The rows as verl's batch, padded on the right."""
    with Path(file).open() as lines:
        outputs = [AgentLoopOutput(**json.loads(line)).as_dict() for line in lines]
    tensors = {
        name: torch.nn.utils.rnn.pad_sequence([output[name] for output in outputs], batch_first=True)
        for name in TENSORS
    }
    others = {name: np.empty(len(outputs), object) for name in outputs[0]["extra_fields"]}
    for number, output in enumerate(outputs):
        for name, value in output["extra_fields"].items():
            others[name][number] = value
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


made = batch(sys.argv[1])
advantages, _ = compute_grpo_outcome_advantage(
    made.batch["rm_scores"], made.batch["response_mask"], made.non_tensor_batch["uid"]
)
said = {name: made.batch[name].tolist() for name in TENSORS}
said["advantages"] = advantages.tolist()
said |= {
    name: list(made.non_tensor_batch[name]) for name in ("uid", "session_id", "min_global_steps", "rows")
}
print(json.dumps(said))
