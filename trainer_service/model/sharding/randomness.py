"""Seeds, saves and restores all random generators of a process together."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, object]:
    """The states of all generators, by library, in the form that a checkpoint stores."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states that `random_states` returned. Without CUDA, the state of CUDA is ignored."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if isinstance(states["cuda"], torch.Tensor) and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
