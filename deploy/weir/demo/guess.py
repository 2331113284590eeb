"""A harder game: a number from 0 to 9 is to be found in four guesses, from what is said to each.

user       guess 0 to 9
assistant  4                     ── the warm-started model mostly guesses whatever comes to its mind
user       higher
assistant  7
user       lower
assistant  5                     ── reward 1, had it been within four
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from openai import AsyncOpenAI

NUMBERS = range(10)
GUESSES = 4
"""Enough for who halves what is left, each time; who guesses blindly finds a third of the numbers."""
QUESTION = f"guess {NUMBERS[0]} to {NUMBERS[-1]}"
MAX_TOKENS = 8


@dataclass(frozen=True)
class SecretNumber:
    """The number to be found, and the world that answers guesses."""

    number: int

    def hint(self, said: str) -> str | None:
        """What is said to a guess, whatever the model made of it; None to the right one."""
        guess = said.strip()
        if not (guess.isascii() and guess.isdigit()):
            return "a number"
        if int(guess) == self.number:
            return None
        return "higher" if int(guess) < self.number else "lower"


class GuessGame:
    """Plays it, turn after turn of one conversation."""

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
    """The guesses of who takes the middle of what is left."""
    left = NUMBERS
    guesses: list[int] = []
    while not guesses or guesses[-1] != secret.number:
        guess = left[(len(left) - 1) // 2]
        guesses.append(guess)
        left = range(guess + 1, left.stop) if guess < secret.number else range(left.start, guess)
    return guesses


def blind(secret: SecretNumber, random: Random) -> list[int]:
    """The guesses of who listens to nothing."""
    guesses: list[int] = []
    while len(guesses) < GUESSES and secret.number not in guesses:
        guesses.append(random.choice(NUMBERS))
    return guesses
