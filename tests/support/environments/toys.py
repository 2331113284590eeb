"""Small environments, as a user would write them, and some that fail."""

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.images import noise_url

Ending = tuple[str | None, float | None, bool, bool, dict[str, Any]]


class Double:
    """One question, one answer."""

    def __len__(self) -> int:
        return 10

    def tasks(self, seed: int) -> Iterator[dict[str, int]]:
        return ({"number": number} for number in range(10))

    def reset(self, task: dict[str, int]) -> str:
        self.number = task["number"]
        return f"double of {self.number}?"

    def step(self, answer: str) -> Ending:
        return None, float(answer == str(2 * self.number)), True, False, {"length": len(answer)}


class Count:
    """The model counts to three; each right number but the last one earns a tenth."""

    def reset(self, task: dict[str, int]) -> str:
        self.next = 1
        return "count"

    def step(self, answer: str) -> Ending:
        right = answer == str(self.next)
        self.next += 1
        if self.next > 3:
            return None, float(right), True, False, {}
        return "go on", 0.1 * right, False, False, {}


class Visible:
    """Says what it was made with, and what everybody on the machine sees of its process."""

    def __init__(self, key: str) -> None:
        self.key = key

    def reset(self, task: dict[str, int]) -> str:
        return f"made with {self.key}, command line {Path('/proc/self/cmdline').read_text()!r}"

    def step(self, answer: str) -> Ending:
        return None, 1.0, True, False, {}


class Zeros:
    """The first answer earns 0; of the second one the environment has no opinion."""

    def reset(self, task: dict[str, int]) -> str:
        self.said = 0
        return "go"

    def step(self, answer: str) -> Ending:
        self.said += 1
        return ("go on", 0.0, False, False, {}) if self.said == 1 else (None, None, True, False, {})


class Cut:
    """Is cut off after two answers by a clock of its own; each answer has earned a half."""

    def reset(self, task: dict[str, int]) -> str:
        self.said = 0
        return "go"

    def step(self, answer: str) -> Ending:
        self.said += 1
        return "go on", 0.5, False, self.said == 2, {}


class Taking:
    """A tool says what has been taken so far; the first answer is right if that was a, then b."""

    tools = ("take",)

    def reset(self, task: dict[str, int]) -> str:
        self.taken: list[str] = []
        return "take a, then b"

    def take(self, name: str) -> str:
        """Take something."""
        self.taken.append(name)
        return f"taken: {', '.join(self.taken)}"

    def step(self, answer: str) -> Ending:
        return None, float(self.taken == ["a", "b"]), True, False, {}


class Lookup:
    """The answer is in a tool."""

    tools = ("look",)

    def reset(self, task: dict[str, int]) -> str:
        self.secret = str(task["seed"] + 7)
        return "what is the secret?"

    def look(self, key: str, times: int = 1) -> str:
        """Look something up."""
        return f"{key}={self.secret * times}"

    def step(self, answer: str) -> Ending:
        return None, float(self.secret in answer), True, False, {}


class Errand:
    """A tool that earns: each right item half of the reward, and the second call ends the episode."""

    tools = ("fetch",)

    def reset(self, task: dict[str, int]) -> str:
        self.left = ["a", "b"]
        return "fetch a, then b"

    def fetch(self, item: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        """Fetch an item."""
        right = item == self.left.pop(0)
        return "here" if right else "no", 0.5 * right, not self.left, False, {"left": len(self.left)}

    def step(self, answer: str) -> Ending:
        return None, 0.0, True, False, {}


class Picture:
    """Shows an image, and after the first answer another one."""

    def reset(self, task: dict[str, int]) -> Any:
        self.seed = task["seed"]
        self.shown = 0
        return self._show("what is it?")

    def step(self, answer: str) -> Any:
        if self.shown < 2:
            return self._show("and this?"), None, False, False, {}
        return None, float(answer == "noise"), True, False, {}

    def _show(self, text: str) -> dict[str, Any]:
        self.shown += 1
        image = {"url": noise_url(96, 64, seed=2 * self.seed + self.shown)}
        content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": image}]
        return {"role": "user", "content": content}


class Race:
    """Two players name a number each; the higher one wins."""

    players = 2

    def reset(self, task: dict[str, int]) -> str:
        self.player, self.said, self.rewards = 0, [], {}  # type: ignore[var-annotated]
        return "name a number"

    def step(self, answer: str) -> Ending:
        self.said.append(int(answer))
        self.player = 1
        if len(self.said) < 2:
            return f"the other said {answer}", None, False, False, {}
        won = 1.0 if self.said[0] > self.said[1] else -1.0
        self.rewards = {0: won, 1: -won}
        return None, None, True, False, {}


class Longer(Race):
    """Two players say something; the longer text wins."""

    def step(self, answer: str) -> Ending:
        return super().step(str(len(answer)))


class Faulty:
    """Fails as `how` says, in the first `fails` tasks. When it hangs, there is the file `mark`."""

    def __init__(self, how: str, fails: int = 1, mark: str = "") -> None:
        self.how, self.fails, self.mark = how, fails, mark

    def reset(self, task: dict[str, int]) -> str:
        self.number = task["seed"]
        return "say hello"

    def step(self, answer: str) -> Ending:
        if self.number >= self.fails:
            return None, 1.0, True, False, {}
        if self.how == "raises":
            raise RuntimeError("the sandbox is gone")
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hangs":
            Path(self.mark).touch()
            time.sleep(1000)  # until it is killed
        if self.how == "prints":
            print("}{ noise on stdout")
        reward = {"nan": math.nan, "null": None, "prints": 1.0}[self.how]
        return None, reward, True, False, {}


class Vault:
    """What is kept under a key is known to a tool server alone; a hint of this class says which key."""

    tools = ("hint",)

    def reset(self, task: dict[str, int]) -> str:
        self.key = task["seed"] % 50
        return "what is kept?"

    def hint(self) -> str:
        return f"the key is {self.key}"

    def step(self, answer: str) -> Ending:
        return None, float(answer == str(self.key * 7 + 3)), True, False, {}


class Judged:
    """Two answers, which somebody else judges."""

    def reset(self, task: dict[str, int]) -> str:
        self.left = 2
        return f"say something about {task['seed']}"

    def step(self, answer: str) -> Ending:
        self.left -= 1
        return "more", None, self.left == 0, False, {}


class Crowded:
    """A game of two players that names an eighth."""

    players, player, rewards = 2, 7, {}  # type: ignore[var-annotated]

    def reset(self, task: dict[str, int]) -> str:
        return "go"


class DiesOnce:
    """Dies when it is first asked for tasks."""

    def __init__(self, mark: str) -> None:
        self.mark = Path(f"{mark}-died")

    def tasks(self, seed: int) -> Iterator[dict[str, int]]:
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ({"number": number} for number in range(10))

    def reset(self, task: dict[str, int]) -> str:
        return "go"

    def step(self, answer: str) -> Ending:
        return None, 1.0, True, False, {}


class Taskless:
    """Has lost its tasks."""

    def tasks(self, seed: int) -> Iterator[dict[str, int]]:
        raise RuntimeError("the list of tasks is gone")
