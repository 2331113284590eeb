"""A harder game than the demo's: find a number from 0 to 9 within four guesses; each guess gets a hint.

user       guess 0 to 9
assistant  4                     ── the warm-started model mostly ignores the hints
user       higher
assistant  7
user       lower
assistant  5                     ── reward 1 if one of four guesses is right

A warm start is supervised training that makes the first model, for reinforcement learning to improve. Its
rows are the token ids that the gateway renders:

clean.jsonl   first phase: mostly conversations that find the number by halving
probe.jsonl   one such conversation for each number; the first phase ends when the model knows 98 % of them
habit.jsonl   second phase: mostly conversations that guess at random, so that there is something to improve
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from openai import AsyncOpenAI

from gateway.language.chat_messages import Message
from gateway.language.render import ChatRenderer
from rollout_queue.contract.packed_tokens import TokenIds
from weir.demo.student import TrainingRow, write_rows, write_student

NUMBERS = range(10)
GUESSES = 4
"""Enough to find every number by halving; random guesses find a third of the numbers."""
QUESTION = f"guess {NUMBERS[0]} to {NUMBERS[-1]}"
MAX_TOKENS = 8


@dataclass(frozen=True)
class SecretNumber:
    """The number to be found, and the hints that follow guesses."""

    number: int

    def hint(self, said: str) -> str | None:
        """The hint that follows the model's guess; None if the guess is right."""
        guess = said.strip()
        if not (guess.isascii() and guess.isdigit()):
            return "a number"
        if int(guess) == self.number:
            return None
        return "higher" if int(guess) < self.number else "lower"


class GuessGame:
    """The game as one conversation: a turn for each guess."""

    def group(self, random: Random, size: int) -> Sequence[SecretNumber]:
        return [SecretNumber(random.choice(NUMBERS))] * size

    def task_id(self, task: SecretNumber) -> str:
        return f"guess-{task.number}"

    async def play(self, client: AsyncOpenAI, task: SecretNumber) -> float:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(GUESSES):
            completion = await client.chat.completions.create(
                model="gpt-4o-mini", messages=messages, max_tokens=MAX_TOKENS
            )
            message = completion.choices[0].message
            if (hint := task.hint(message.content or "")) is None:
                return 1.0
            messages += [message, {"role": "user", "content": hint}]
        return 0.0


def halving(secret: SecretNumber) -> list[int]:
    """The guesses of a player that always takes the middle of the remaining numbers."""
    left = NUMBERS
    guesses: list[int] = []
    while not guesses or guesses[-1] != secret.number:
        guess = left[(len(left) - 1) // 2]
        guesses.append(guess)
        left = range(guess + 1, left.stop) if guess < secret.number else range(left.start, guess)
    return guesses


def blind(secret: SecretNumber, random: Random) -> list[int]:
    """The guesses of a player that ignores the hints."""
    guesses: list[int] = []
    while len(guesses) < GUESSES and secret.number not in guesses:
        guesses.append(random.choice(NUMBERS))
    return guesses


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
