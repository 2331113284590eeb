"""A short soak passes."""

from pathlib import Path

import pytest

from tests.soak.result import lines
from tests.soak.run import soak

MINUTES, AGENTS = 2.0, 32


@pytest.mark.long
def test_a_short_soak_passes(tmp_path: Path, tiny_model: Path) -> None:
    result = soak(tmp_path / "run", tiny_model, MINUTES, AGENTS, seed=1)
    print("\n".join(lines(result)))
    assert not result.faulty
