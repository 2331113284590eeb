"""Ask a register with one JSON object, then answer with another: a call and its use, in two turns."""

import json
from random import Random
from typing import Any

from weir.demo.extraction import CITIES, NAMES

QUESTIONS = {"age": "How old is {}?", "city": "Where does {} live?"}
ORDER = (
    'Ask the register with one JSON object, {"look": NAME}. Then answer with one JSON object that has the '
    "key asked for."
)
EXAMPLES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("age", {"name": "Diana", "age": 77, "city": "London"}),
    ("city", {"name": "Peter", "age": 31, "city": "Cairo"}),
)


def asked_of(name: str, key: str) -> list[dict[str, str]]:
    """What the model reads: the order, two examples of both turns, and the question."""
    turns = [("system", ORDER)]
    for of, known in EXAMPLES:
        turns += [
            ("user", QUESTIONS[of].format(known["name"])),
            ("assistant", json.dumps({"look": known["name"]})),
            ("user", json.dumps(known)),
            ("assistant", json.dumps({of: known[of]})),
        ]
    return [{"role": role, "content": text} for role, text in (*turns, ("user", QUESTIONS[key].format(name)))]


class Lookup:
    """A right call is worth a half, and the register answers it. A right answer is worth a half."""

    def reset(self, task: dict[str, Any]) -> list[dict[str, str]]:
        draw = Random(task["seed"])
        self._known: dict[str, Any] = {
            "name": draw.choice(NAMES),
            "age": draw.randint(18, 90),
            "city": draw.choice(CITIES),
        }
        self._key, self._asked = draw.choice(list(QUESTIONS)), False
        return asked_of(self._known["name"], self._key)

    def step(self, answer: str) -> tuple[str | None, float, bool, bool, dict[str, float]]:
        wanted = {self._key: self._known[self._key]} if self._asked else {"look": self._known["name"]}
        right = _says(answer, wanted)
        goes_on, self._asked = right and not self._asked, True
        return json.dumps(self._known) if goes_on else None, right / 2, not goes_on, False, {}


def _says(answer: str, wanted: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(answer.strip()) == wanted)
    except (ValueError, RecursionError):
        return False
