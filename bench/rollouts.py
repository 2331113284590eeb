"""Rollouts of random tokens to train on: most are short, and a few are very long.

This module needs only the standard library, so that environments without Weir can read rollouts.
"""

import json
import math
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

SPREAD = 0.95
"""Standard deviation of the logarithm of the lengths. The longest of 64 is six to eight times their mean."""
SHORTEST = 16


@dataclass(frozen=True)
class SyntheticRollout:
    """One prompt and its completion, as token ids."""

    prompt: list[int]
    completion: list[int]
    advantage: float
    logprobs: list[float]
    """Log-probabilities of the completion's tokens under the weights before training, in nats; 0 for those
    that are not trained."""
    mask: list[int] = field(default_factory=list)
    """1 for each token of the completion that is trained, else 0. Empty: all are trained."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def trained(self) -> list[int]:
        """`mask`, with an entry for each token of the completion."""
        return self.mask or [1] * len(self.completion)


def drawn(count: int, vocabulary: int, median: int, longest: int, seed: int) -> list[SyntheticRollout]:
    """Rollouts with log-normal lengths around `median` tokens, a quarter of them prompt. They have no
    logprobs yet."""
    draw = random.Random(seed)
    lengths = [int(draw.lognormvariate(math.log(median), SPREAD)) for _ in range(count)]
    made = []
    for length in (min(max(length, SHORTEST), longest) for length in lengths):
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        made.append(SyntheticRollout(ids[: length // 4], ids[length // 4 :], draw.gauss(0, 1), []))
    return made


def sessions(
    count: int, vocabulary: int, length: int, turns: int, answer: int, seed: int
) -> list[SyntheticRollout]:
    """Agents' sessions of `length` tokens, with `turns` answers of `answer` tokens at equal distances. Only
    the answers are trained. They have no logprobs yet."""
    draw = random.Random(seed)
    between = (length - turns * answer) // turns
    mask = ([1] * answer + [0] * between) * turns
    begin = length - turns * answer - (turns - 1) * between
    made = []
    for _ in range(count):
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        made.append(SyntheticRollout(ids[:begin], ids[begin:], draw.gauss(0, 1), [], mask[: length - begin]))
    return made


def group(count: int, vocabulary: int, prompt: int, answer: int, seed: int) -> list[SyntheticRollout]:
    """Rollouts of one prompt of `prompt` tokens, with answers of `answer` tokens. They have no logprobs
    yet."""
    draw = random.Random(seed)
    shared = [draw.randrange(vocabulary) for _ in range(prompt)]
    return [
        SyntheticRollout(shared, [draw.randrange(vocabulary) for _ in range(answer)], draw.gauss(0, 1), [])
        for _ in range(count)
    ]


def tokens(rollouts: list[SyntheticRollout]) -> int:
    """The number of tokens, prompts included."""
    return sum(map(len, rollouts))


def fewer(rollouts: list[SyntheticRollout], count: int) -> list[SyntheticRollout]:
    """`count` of the rollouts: the longest, and random others with about the same mean length as all. The
    cost of padding depends on these two lengths."""
    if count >= len(rollouts):
        return rollouts
    longest, *others = sorted(range(len(rollouts)), key=lambda index: -len(rollouts[index]))
    draw = random.Random(0)
    picks = [sorted([longest, *draw.sample(others, count - 1)]) for _ in range(500)]
    wanted = tokens(rollouts) * count / len(rollouts)
    chosen = [[rollouts[index] for index in pick] for pick in picks]
    return min(chosen, key=lambda some: abs(tokens(some) - wanted))


def small(rollouts: list[SyntheticRollout]) -> list[SyntheticRollout]:
    """The rollouts cut to a few tokens, for a warm-up step that uses all parts of a step."""
    return [
        replace(r, prompt=r.prompt[:4], completion=r.completion[:4], logprobs=r.logprobs[:4], mask=r.mask[:4])
        for r in rollouts
    ]


def write(rollouts: list[SyntheticRollout], path: Path) -> None:
    path.write_text(json.dumps([asdict(rollout) for rollout in rollouts]), encoding="utf-8")


def read(path: Path) -> list[SyntheticRollout]:
    return [SyntheticRollout(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
