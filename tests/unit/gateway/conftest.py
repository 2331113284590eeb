"""The fixture of the tests of families."""

import pytest

from gateway.language.families import Thinking
from gateway.language.render import ChatRenderer
from tests.support.gateway.families_agent import RendererOf, renderer_of


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> RendererOf:
    directory = tmp_path_factory.mktemp("families")

    def of(family: str, thinking: Thinking = "template") -> ChatRenderer:
        return renderer_of(directory, family, thinking)

    return of
