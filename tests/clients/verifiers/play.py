"""The program of a user of verifiers: episodes of a taskset with the library's own chat harness."""

import asyncio
import json
import os
import sys
from pathlib import Path

from letters import LettersConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment

ROLLOUTS = 1
"""Of each task."""


# The library starts the taskset's tools, and its harness with `uv`, as processes of their own.
os.environ["PYTHONPATH"] = str(Path(__file__).parent)
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def client(kind):
    endpoint = {"type": kind, "base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
    if kind == "train":
        # The library chooses renderers by the names of public models, so a model of one's own names it.
        # Only a renderer that keeps thoughts continues the sampled ids after a question of the user.
        renderer = {"name": "qwen3", "thinking_retention": "all"}
        endpoint |= {"renderer": renderer, "renderer_model_name": os.environ["MODEL_DIRECTORY"]}
    return endpoint


async def episodes(kind):
    agent = {
        "harness": {"id": "null"},
        "runtime": {"type": "subprocess"},
        "client": client(kind),
        "max_turns": 6,
    }
    config = SingleAgentEnvConfig(
        taskset=LettersConfig(id="letters"), agent=AgentConfig.model_validate(agent)
    )
    environment = load_environment(config)
    sampling = SamplingConfig(temperature=1.0, max_tokens=64)
    context = ModelContext(model="policy", client=config.agent.client, sampling=sampling)
    async with environment.serving():
        slots = [slot for task in environment.taskset for slot in environment.slots(task, ROLLOUTS)]
        return await asyncio.gather(
            *(environment.run_slot(slot, context, asyncio.Semaphore(2)) for slot in slots)
        )


def told(trace):
    return {
        "id": trace.id,
        "ok": trace.ok,
        "errors": [f"{error.type}: {error.message}" for error in trace.errors],
        "reward": trace.reward,
        "branches": [
            {"ids": branch.token_ids, "sampled": branch.sampled_mask, "logprobs": branch.logprobs}
            for branch in trace.branches
        ],
    }


def run(kind):
    done = asyncio.run(episodes(kind))
    return {
        "ok": [episode.ok for episode in done],
        "traces": [told(trace) for each in done for trace in each.traces],
    }


print(json.dumps(run(sys.argv[1])))
