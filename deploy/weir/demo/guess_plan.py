"""The training rows of the guessing game's warm start, in exactly the ids that the gateway will render.

clean.jsonl   the skill: mostly halving          habit.jsonl   the habit: mostly blind guesses
probe.jsonl   the gate: every number found by halving, exact
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
"""Share of random guessing in clean.jsonl, so that the model also knows the habit."""
HABIT_BLIND = 0.8
"""Share of random guessing in habit.jsonl, from which reinforcement learning starts."""
HALVED, BLIND_SEED = 20, 0
"""HALVED: how often each number is found by halving, in each file."""


def write_guess_plan(directory: Path) -> None:
    """Write config, tokenizer, rows and hyperparameters for `python -m trainer_service.warm_start`."""
    write_student(directory)
    examples = GuessExamples(ChatRenderer(directory, thinking="all"))  # else a hint begins a new prompt
    halved = [examples.row(secret, halving(secret)) for secret in map(SecretNumber, NUMBERS)]
    random = Random(BLIND_SEED)
    for name, share in (("clean", CLEAN_BLIND), ("habit", HABIT_BLIND)):
        used = halved * HALVED
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
