"""A mutant changes the functions of a module that is imported already, whoever holds them."""

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutants.mutant import Mutant, find, mutants_in
from tests.mutants.swapping import CannotSwap, LoadedFunctions

TOY = """
import contextlib
from functools import cached_property


class Toy:
    size = 1

    @property
    def larger(self):
        return self.size + 1

    @cached_property
    def much_larger(self):
        return self.size + 10

    @contextlib.contextmanager
    def resized(self):
        yield self.size + 100

    def named(self):
        return __class__


def outer():
    def inner(number):
        return number > 2
    return inner


REGISTRY = {"outer": outer}
"""


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "toy_of_mutants.py").write_text(TOY)
    spec = importlib.util.spec_from_file_location("toy_of_mutants", tmp_path / "toy_of_mutants.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_of_mutants"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["toy_of_mutants"]


@cache
def mutants(root: Path) -> list[Mutant]:
    return list(mutants_in(root, "toy_of_mutants.py"))


def swap(root: Path, before: str, after: str) -> None:
    [mutant] = [each for each in mutants(root) if (each.before, each.after) == (before, after)]
    found = find(root, mutant)
    assert found
    LoadedFunctions(root, {found.module}).swap(found)


def test_properties_change(toy: ModuleType, tmp_path: Path) -> None:
    swap(tmp_path, "self.size + 1", "self.size - 1")
    swap(tmp_path, "self.size + 10", "self.size - 10")
    assert (toy.Toy().larger, toy.Toy().much_larger) == (0, -9)


def test_a_decorated_function_changes(toy: ModuleType, tmp_path: Path) -> None:
    swap(tmp_path, "100", "101")
    with toy.Toy().resized() as size:
        assert size == 102


def test_a_function_within_a_function_changes_for_those_who_held_the_outer_one(
    toy: ModuleType, tmp_path: Path
) -> None:
    swap(tmp_path, "number > 2", "number >= 2")
    assert toy.REGISTRY["outer"]()(2)


def test_code_that_no_longer_refers_to_its_class_fits(toy: ModuleType, tmp_path: Path) -> None:
    assert toy.Toy().named() is toy.Toy
    swap(tmp_path, "return __class__", "return None")
    assert toy.Toy().named() is None


def test_a_module_that_is_not_imported_cannot_change(tmp_path: Path) -> None:
    (tmp_path / "toy_of_mutants.py").write_text(TOY)
    with pytest.raises(CannotSwap, match="has no function"):
        swap(tmp_path, "100", "101")
