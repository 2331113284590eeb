"""Writes the training rows of the guessing game's warm start, as the token ids that the gateway renders.

A warm start is supervised training that makes the first model, for reinforcement learning to improve.

clean.jsonl   first phase: mostly conversations that find the number by halving
probe.jsonl   one such conversation for each number; the first phase ends when the model knows 98 % of them
habit.jsonl   second phase: mostly conversations that guess at random, so that there is something to improve
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from gateway.language.chat_messages import Message
from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds
from weir.demo.guess import NUMBERS, QUESTION, SecretNumber, blind, halving
from weir.demo.plan import TrainingRow, write_rows, write_student

CLEAN_BLIND = 0.3
"""The share of conversations in clean.jsonl that guess at random. The model learns to guess so, too."""
HABIT_BLIND = 0.8
"""The share of conversations in habit.jsonl that guess at random. After them, the model mostly guesses so."""
REPETITIONS = 20
"""How many conversations in clean.jsonl, and in habit.jsonl, find each number by halving."""
BLIND_SEED = 0


def write_guess_plan(directory: Path) -> None:
    """Write config, tokenizer, rows and hyperparameters for `python -m trainer_service.warm_start`."""
    write_student(directory)
    # With another value of `thinking`, a hint would begin a new prompt instead of continuing the old one.
    examples = GuessExamples(ChatRenderer(directory, thinking="all"))
    halved = [examples.row(secret, halving(secret)) for secret in map(SecretNumber, NUMBERS)]
    random = Random(BLIND_SEED)
    for name, share in (("clean", CLEAN_BLIND), ("habit", HABIT_BLIND)):
        used = halved * REPETITIONS
        count = round(len(used) * share / (1 - share))
        write_rows(directory / f"{name}.jsonl", [*used, *examples.blind(count, random)])
    write_rows(directory / "probe.jsonl", halved)


class GuessExamples:
    """Writes conversations as the gateway would record them."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def row(self, secret: SecretNumber, guesses: Sequence[int]) -> TrainingRow:
        prompt = self._renderer.render([{"role": "user", "content": QUESTION}], None)
        ids, mask = list(prompt), [0] * len(prompt)
        for place, guess in enumerate(guesses):
            said = TokenIds(self._renderer.tokenizer.encode(f"{guess}<|im_end|>"))
            added = self._hint(TokenIds(ids), said, secret.hint(str(guess)))
            last = place == len(guesses) - 1
            ids += [*said] if last else [*said, *added]
            mask += [1] * len(said) + ([] if last else [0] * len(added))
        return ids, mask

    def blind(self, count: int, random: Random) -> Iterator[TrainingRow]:
        for _ in range(count):
            secret = SecretNumber(random.choice(NUMBERS))
            yield self.row(secret, blind(secret, random))

    def _hint(self, prompt: TokenIds, said: TokenIds, hint: str | None) -> TokenIds:
        if hint is None:
            return TokenIds([])
        answer: Message = {"role": "user", "content": hint}
        added = self._renderer.bridge(prompt, said, [answer], None)
        if added is None:
            raise RuntimeError("the chat template cannot append a hint to a conversation")
        return added
