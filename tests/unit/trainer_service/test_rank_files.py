"""What ranks write: their shares of a version's tensors, and copies of a checkpoint's files."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_service.model.host_copies import FileCopies, shares_of


@pytest.mark.parametrize(
    ("sizes", "keepers", "shares"),
    [
        ([5, 5], 1, [[0, 1]]),
        ([1, 2, 3, 4], 2, [[0, 3], [1, 2]]),
        ([1, 100, 1, 1], 2, [[1], [0, 2, 3]]),
        ([7], 3, [[0], [], []]),
    ],
)
def test_shares_have_about_as_many_bytes_each_and_a_large_tensor_stands_alone(
    sizes: list[int], keepers: int, shares: list[list[int]]
) -> None:
    assert shares_of(sizes, keepers) == shares


# Copies have the values of each moment at which DeepSpeed saves a file


class SavingEngine:
    """Plays an engine that makes the tensors of each file when it saves it, as DeepSpeed does. Memory that is
    free again comes to the next file's tensors."""

    def __init__(self) -> None:
        self.checkpoint_engine = type("Saver", (), {})()
        self.scratch = torch.zeros(3)

    def save_checkpoint(self, *_: object, **__: object) -> None:
        save: Callable[[Any, str], None] = self.checkpoint_engine.save
        for number, name in enumerate(("weights.pt", "optimizer.pt"), 1):
            self.scratch.fill_(number)
            save({"value": self.scratch, "tied": [self.scratch]}, f"copy/{name}")


def test_memory_that_is_used_again_is_copied_again_and_names_still_share_a_tensor(tmp_path: Path) -> None:
    FileCopies(SavingEngine()).take({}).write(tmp_path)
    read = [torch.load(tmp_path / name) for name in ("weights.pt", "optimizer.pt")]
    assert [each["value"].tolist() for each in read] == [[1.0] * 3, [2.0] * 3]
    assert [each["value"].data_ptr() for each in read] == [each["tied"][0].data_ptr() for each in read]


def test_from_the_cpu_nothing_holds_the_memory_of_a_copy_that_is_written(tmp_path: Path) -> None:
    copies = FileCopies(SavingEngine())
    copied = copies.take({})
    memory = [weakref.ref(file["value"]) for file in copied.files.values()]
    copied.write(tmp_path)
    assert all(each() is not None for each in memory)
    del copied
    assert [each() for each in memory] == [None, None]
