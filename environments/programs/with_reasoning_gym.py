"""`reasoning_gym:TASK`: a question, one answer, and the library's own score from 0 to 1.

Options are those of the dataset, such as `min_digits`, and `examples`: so many solved questions stand before
each, which shows a model the form of an answer. Tasks have no end: each block of 1024 is a dataset of its own
seed. A task brings the library's entry with it, so that an episode need not make the dataset again, which
takes most of a second for some.
"""

import pickle
from base64 import b64decode, b64encode
from importlib.metadata import version
from typing import Any

import host_answers
import reasoning_gym

BLOCK = 1024
EXAMPLES_SEED = 2**31 - 1
"""No run has tasks of this seed."""
MOST_EXAMPLES = 64


def environments(name: str, options: dict[str, Any]) -> "Datasets":
    return Datasets(name, options)


class Datasets:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._options = name, dict(options)
        self._examples = self._solved(self._options.pop("examples", 0))
        self._blocks: dict[int, Any] = {}
        self.scorer = self.dataset(0)

    def describe(self) -> dict[str, Any]:
        return {"name": f"reasoning_gym:{self._name}", "version": version("reasoning_gym")}

    def tasks(self, seed: int, start: int, count: int) -> list[dict[str, Any]]:
        found = []
        for number in range(start, start + count):
            block, place = divmod(number, BLOCK)
            entry = self.dataset(seed * host_answers.SEEDS + block)[place]
            whole = b64encode(pickle.dumps(entry)).decode()  # JSON would make lists of its tuples
            data = {"question": entry["question"], "answer": entry["answer"], "entry": whole}
            found.append({"id": f"{seed}:{number}", "data": data})
        return found

    def dataset(self, seed: int) -> Any:
        """Made anew for each block of tasks, and only the last few are kept."""
        if seed not in self._blocks:
            while len(self._blocks) >= 8:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[seed] = self._made(seed, BLOCK)
        return self._blocks[seed]

    def _made(self, seed: int, size: int) -> Any:
        return reasoning_gym.create_dataset(self._name, seed=seed, size=size, **self._options)

    def _solved(self, count: Any) -> list[dict[str, str]]:
        """So many questions, each with its answer. Raises Mistake."""
        if not (isinstance(count, int) and 0 <= count <= MOST_EXAMPLES):
            raise host_answers.Mistake(f"examples: {count!r} is not a number from 0 to {MOST_EXAMPLES}")
        said = []
        for entry in self._made(EXAMPLES_SEED, count) if count else ():
            if entry["answer"] is None:
                raise host_answers.Mistake(f"examples: {self._name} has no answers, only scores")
            said += [{"role": "user", "content": entry["question"]}]
            said += [{"role": "assistant", "content": str(entry["answer"])}]
        return said

    def new(self) -> "ScoredQuestion":
        return ScoredQuestion(self.scorer, self._examples)


class ScoredQuestion:
    def __init__(self, scorer: Any, examples: list[dict[str, str]]) -> None:
        self._scorer, self._examples = scorer, examples

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        self._entry = pickle.loads(b64decode(data["entry"]))  # noqa: S301 - `tasks` has written it
        return host_answers.step([*self._examples, {"role": "user", "content": self._entry["question"]}])

    def step(self, answer: str) -> dict[str, Any]:
        score = self._scorer.score_answer(answer.strip(), self._entry)
        return host_answers.step(None, score, terminated=True)

    def close(self) -> None:
        """Nothing is open."""
