"""Real services, started once for all tests of what operators see of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.observe.observed import Observed, observed_system


@pytest.fixture(scope="session")
def observed(
    tiny_model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observed]:
    with observed_system(tiny_model, tokenizer, tmp_path_factory.mktemp("observed")) as system:
        yield system
