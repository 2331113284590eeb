"""The device of the trainer's tests: the CPU, or a GPU with WEIR_TEST_DEVICE=cuda in the environment."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # the models are too small for more, and other test processes use the other cores

DEVICE = torch.device(os.environ.get("WEIR_TEST_DEVICE", "cpu"))
ON_DEVICE: dict[str, Any] = {"device": DEVICE.type}
"""What the settings of a trainer say of it. On a GPU, nobody replaces `auto` for the tests."""
if DEVICE.type == "cuda":
    ON_DEVICE |= {"dtype": "float32", "activation_checkpointing": False}

SPARING = {"TORCHDYNAMO_DISABLE": "1", "LOCAL_SIZE": "1"}
"""The environment in which DeepSpeed does not import `torch.compile`, which takes seconds and which nothing
uses, and does not start numactl at each gradient of stage 3."""


@pytest.fixture(autouse=True)
def sparing_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the processes that the test starts. On CPU, DeepSpeed collects no garbage: with the objects of
    all that the tests have imported, each of its many collections would take half a second."""
    for name, value in SPARING.items():
        monkeypatch.setenv(name, value)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gc, "collect", lambda generation=2: 0)


@pytest.fixture(autouse=True)
def freed_memory() -> Iterator[None]:
    """On a GPU, free the policies of the test. They are in circles, and each has gigabytes of buffers."""
    yield
    if DEVICE.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
