"""What each rank of a small trainer runs in test_ranks.py: its folder holds settings and rows, pickled."""

import pickle
import sys
from pathlib import Path

from trainer_service.policy import Policy
from trainer_service.ranks import Leader, follow, own_rank


def main(folder: Path) -> None:
    settings, steps = pickle.loads((folder / "task.pickle").read_bytes())  # noqa: S301 - the test's own
    policy = Policy(settings)
    if own_rank() > 0:
        follow(policy)
        return
    leader = Leader(policy)
    if (folder / "checkpoints").exists():
        leader.load(folder / "checkpoints", "tag")
    metrics = [leader.optimise(rows, 0, settings.algorithm) for rows in steps]
    leader.save(folder / "checkpoints", "tag")
    leader.export(folder / "weights.safetensors")
    leader.close()
    (folder / "metrics.pickle").write_bytes(pickle.dumps(metrics))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
