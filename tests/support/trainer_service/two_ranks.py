"""What each rank of a small trainer runs in test_ranks.py: its folder holds settings and rows, pickled.

It learns what its last checkpoint has not learnt yet, one step a checkpoint; if told so, each of them in two
parts, and what it began before that it forgets. In the end rank 0 has nothing to say for as long as there is
a file `rest`.
"""

import pickle
import sys
import time
from pathlib import Path

from trainer_service.model.policy import DeepSpeedPolicy
from trainer_service.step.ranks import Leader, follow, own_rank
from trainer_service.step.step_request import StepRequest
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState


def main(folder: Path) -> None:
    settings, steps, probes, in_parts = pickle.loads((folder / "task.pickle").read_bytes())  # noqa: S301 - the test's own
    policy = DeepSpeedPolicy(settings)
    if own_rank() > 0:
        follow(policy)
        return
    leader = Leader(policy)
    checkpoints = Checkpoints(folder / "checkpoints", 2)
    done = (checkpoints.restore(leader) or RunState()).step
    told = []
    for step, rows in enumerate(steps[done:], done + 1):
        half = len(rows) // 2 if in_parts else 0
        if half:
            leader.accumulate(StepRequest(rows, 0, settings.algorithm))
            leader.discard_gradients()
            leader.accumulate(StepRequest(rows[:half], 0, settings.algorithm))
        told.append(leader.optimise(StepRequest(rows[half:], 0, settings.algorithm)))
        checkpoints.save(leader, RunState(step=step), [])
    sound = [leader.gradient_is_finite(StepRequest(rows, 0, settings.algorithm)) for rows in probes]
    finite = leader.weights_are_finite()
    leader.export(folder / "weights.safetensors")
    (folder / "idle").touch()
    while (folder / "rest").exists():
        time.sleep(0.1)
    leader.close()
    (folder / "told.pickle").write_bytes(pickle.dumps((told, sound, finite)))


if __name__ == "__main__":
    main(Path(sys.argv[-1]))  # DeepSpeed's launcher says --local_rank before it
