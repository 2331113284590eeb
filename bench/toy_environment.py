"""An environment that costs nothing, so that a benchmark measures the runner."""

from typing import Any

STEPS = 8


class Toy:
    """Eight answers, each with a reward."""

    def reset(self, task: dict[str, int]) -> str:
        self.left = STEPS
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return "go on", float(len(answer) % 2), self.left == 0, False, {}
