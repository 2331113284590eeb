"""The copy of a checkpoint's files has the values of each moment at which DeepSpeed saves a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer_service.model.sharding.file_copies import FileCopies


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


def test_memory_that_is_used_again_is_copied_again(tmp_path: Path) -> None:
    copies = FileCopies(SavingEngine())
    copies.take({})
    copies.write(tmp_path)
    read = [torch.load(tmp_path / name) for name in ("weights.pt", "optimizer.pt")]
    assert [each["value"].tolist() for each in read] == [[1.0] * 3, [2.0] * 3]


def test_names_that_share_a_tensor_still_share_it(tmp_path: Path) -> None:
    copies = FileCopies(SavingEngine())
    copies.take({})
    copies.write(tmp_path)
    read = torch.load(tmp_path / "weights.pt")
    assert read["value"].data_ptr() == read["tied"][0].data_ptr()
