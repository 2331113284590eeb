"""The task of the demo with a real model: write what a sentence says about a person as one JSON object.

sentence in one of five forms ──▶ {"name": …, "age": …, "city": …} ──▶ reward 1, or 0
"""

import json
from random import Random
from typing import Any

NAMES = (
    *("Anna", "Ben", "Carla", "David", "Elena", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karin", "Leo"),
    *("Maria", "Nils", "Olga", "Paul", "Rosa", "Simon", "Tara", "Victor"),
)
CITIES = (
    *("London", "Paris", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Lisbon", "Dublin", "Prague"),
    *("Athens", "Warsaw", "Zurich", "Milan", "Lyon", "Bergen"),
)
FORMS = (
    "{name} is {age} years old and lives in {city}.",
    "In {city} lives {name}, who is {age}.",
    "{name}, {age}, comes from {city}.",
    "My friend {name} from {city} turned {age} today.",
    "At the age of {age}, {name} moved to {city}.",
)
EXAMPLE = (
    "Diana is 77 years old and lives in London.",
    {"name": "Diana", "age": 77, "city": "London"},
)
ORDER = 'Answer with exactly one JSON object that has the keys "name", "age" and "city".'


def sentence_of(seed: int) -> tuple[str, dict[str, Any]]:
    """The sentence of a task, and what it says."""
    random = Random(seed)
    said = {"name": random.choice(NAMES), "age": random.randint(18, 90), "city": random.choice(CITIES)}
    return random.choice(FORMS).format(**said), said


def asked_about(sentence: str) -> list[dict[str, str]]:
    """What the model reads: the order, one example, and the sentence. The example is a turn: in one text with
    the sentence, a small model copies it, and begins with a reward of 0.02 where this has 0.35."""
    told, said = EXAMPLE
    turns = (("system", ORDER), ("user", told), ("assistant", json.dumps(said)), ("user", sentence))
    return [{"role": role, "content": content} for role, content in turns]


def reward_of(answer: str, said: dict[str, Any]) -> float:
    """1 if the whole answer is one JSON object that says the same, else 0."""
    try:
        return float(json.loads(answer) == said)
    except (ValueError, RecursionError):
        return 0.0


class Extraction:
    """One sentence, one answer."""

    def reset(self, task: dict[str, Any]) -> list[dict[str, str]]:
        sentence, self._said = sentence_of(task["seed"])
        return asked_about(sentence)

    def step(self, answer: str) -> tuple[None, float, bool, bool, dict[str, float]]:
        return None, reward_of(answer.strip(), self._said), True, False, {}
