"""DeepSpeed's converter of checkpoints, run in the test's own process."""

import sys

import pytest


def convert_here(arguments: list[str], name: str) -> None:
    """Takes the place of `trainer_service.model.checkpoint_layout.run_converter`."""
    from deepspeed.checkpoint import ds_to_universal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        ds_to_universal.main(ds_to_universal.parse_arguments())
