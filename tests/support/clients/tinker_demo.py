"""Runs a loop of `tinker-cookbook` on a stack of this machine, and prints the mean reward of each iteration.

python -m tests.support.clients.tinker_demo
"""

import tempfile
from pathlib import Path

from tests.support.clients.tinker_stack import tinker_stack
from tests.support.tiny_model import PEAKED, make_tiny_model

CLIENT, SCENE = "cookbook_newest", "synchronous"
REWARD, WIDTH = "env/all/reward/total", 50


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(Path(directory) / "models" / "tiny", head_scale=PEAKED)
        print("starting Redis, SGLang, the gateway and the trainer", flush=True)
        with tinker_stack(Path(directory) / "run", model) as running:
            print("tinker-cookbook trains: 8 iterations of 4 groups of 4 rollouts", flush=True)
            told = running.play(CLIENT, SCENE)
        for iteration, step in enumerate(step for step in told["steps"] if REWARD in step):
            print(f"iteration {iteration}: reward {step[REWARD]:.3f} {'#' * round(WIDTH * step[REWARD])}")


if __name__ == "__main__":
    main()
