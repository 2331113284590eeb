"""The list of mistakes (`tests/mistakes.yaml`), each with the door at which it is made."""

from pathlib import Path
from typing import Any

import pytest
import yaml

LIST = Path(__file__).parents[1] / "mistakes.yaml"
DOORS = ("weir", "service", "request", "episodes", "make", "readme")


def mistakes_at(*doors: str) -> list[Any]:
    """The mistakes at these doors, as parameters of a test."""
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return [
        pytest.param(each, id=each["mistake"].replace(" ", "_")) for each in listed if {*doors} & each.keys()
    ]
