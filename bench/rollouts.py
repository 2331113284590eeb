"""Rollouts to train on, of random tokens: most are short, and a few are very long.

The standard library alone: environments that have nothing of ours read them too.
"""

import json
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

SPREAD = 0.95
"""Standard deviation of the logarithm of the lengths: the longest of 64 is six to eight times their mean."""
SHORTEST = 16


@dataclass(frozen=True)
class Rollout:
    """One prompt and what was sampled after it."""

    prompt: list[int]
    completion: list[int]
    advantage: float
    logprobs: list[float]
    """Of the completion, under the weights that training starts from."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def drawn(count: int, vocabulary: int, median: int, longest: int, seed: int) -> list[Rollout]:
    """Lengths are log-normal around `median`; a quarter of each is its prompt. Logprobs are not known yet."""
    draw = random.Random(seed)
    lengths = [int(draw.lognormvariate(math.log(median), SPREAD)) for _ in range(count)]
    made = []
    for length in (min(max(length, SHORTEST), longest) for length in lengths):
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        made.append(Rollout(ids[: length // 4], ids[length // 4 :], draw.gauss(0, 1), []))
    return made


def tokens(rollouts: list[Rollout]) -> int:
    return sum(map(len, rollouts))


def fewer(rollouts: list[Rollout], count: int) -> list[Rollout]:
    """So many of them: the longest, and others by chance so that their mean length is that of all. The cost
    of padding depends on these two."""
    if count >= len(rollouts):
        return rollouts
    longest, *others = sorted(range(len(rollouts)), key=lambda index: -len(rollouts[index]))
    draw = random.Random(0)
    picks = [sorted([longest, *draw.sample(others, count - 1)]) for _ in range(500)]
    wanted = tokens(rollouts) * count / len(rollouts)
    chosen = [[rollouts[index] for index in pick] for pick in picks]
    return min(chosen, key=lambda some: abs(tokens(some) - wanted))


def small(rollouts: list[Rollout]) -> list[Rollout]:
    """As many, cut to a few tokens: a step of them touches everything that a step touches."""
    return [
        replace(r, prompt=r.prompt[:4], completion=r.completion[:4], logprobs=r.logprobs[:4])
        for r in rollouts
    ]


def write(rollouts: list[Rollout], path: Path) -> None:
    path.write_text(json.dumps([asdict(rollout) for rollout in rollouts]), encoding="utf-8")


def read(path: Path) -> list[Rollout]:
    return [Rollout(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
