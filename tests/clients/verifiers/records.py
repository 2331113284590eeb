"""Writes what the library knows of the traces of an episode, for tests to compare."""

import json
from pathlib import Path


def write(path, episode):
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(known(trace)) + "\n" for trace in episode.traces)


def known(trace):
    return {
        "id": trace.id,
        "rewards": {name: given.value for name, given in trace.rewards.items() if given is not None},
        "branches": [
            {"ids": branch.token_ids, "sampled": branch.sampled_mask, "logprobs": branch.logprobs}
            for branch in trace.branches
        ],
    }
