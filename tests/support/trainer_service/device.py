"""The device of the trainer's tests: the CPU, or a GPU with WEIR_TEST_DEVICE=cuda in the environment."""

import os
from typing import Any

import torch

DEVICE = torch.device(os.environ.get("WEIR_TEST_DEVICE", "cpu"))
ON_DEVICE: dict[str, Any] = {"device": DEVICE.type}
"""What the settings of a trainer say of it. On a GPU, nobody replaces `auto` for the tests."""
if DEVICE.type == "cuda":
    ON_DEVICE |= {"dtype": "float32", "activation_checkpointing": False}
