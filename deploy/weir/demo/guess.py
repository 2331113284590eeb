"""A harder game: find a number from 0 to 9 within four guesses; each guess gets a hint.

user       guess 0 to 9
assistant  4                     ── the warm-started model mostly ignores the hints
user       higher
assistant  7
user       lower
assistant  5                     ── reward 1 if one of four guesses is right
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from openai import AsyncOpenAI

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
