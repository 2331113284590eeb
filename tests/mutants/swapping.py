"""Puts a mutant's code into the functions of this process, where modules are imported already.

A decorator, a property or a registry holds the function itself. So the function keeps its identity, and only
its code is replaced. What ran while modules were imported has run: a mutant in it changes nothing.
"""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from tests.mutants.mutant import Found, functions, mutated


class CannotSwap(Exception):
    """The mutant's function is not in this process, or its code does not fit into it."""


class LoadedFunctions:
    """The functions of some modules that this process has imported."""

    def __init__(self, root: Path, modules: set[str]) -> None:
        self._root = root
        paths = {str((root / module).resolve()): module for module in modules}
        self._found: dict[tuple[str, str, int], list[FunctionType]] = {}
        gc.unfreeze()  # get_objects() leaves out what tests/conftest.py has frozen
        for each in gc.get_objects():
            if type(each) is FunctionType and (module := paths.get(each.__code__.co_filename)):
                code = each.__code__
                self._found.setdefault((module, code.co_qualname, code.co_firstlineno), []).append(each)

    def swap(self, found: Found) -> None:
        """Replace the code of the mutant's function, in every function that was made of it."""
        name = found.function.split("@")[0]
        tree = mutated(self._root, found)
        function = functions(tree)[found.function]
        lineno = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        loaded = self._found.get((found.module, name, lineno), [])
        if not loaded:
            raise CannotSwap(f"{found.module} has no function {name} in this process")
        if any("__class__" in each.__code__.co_freevars for each in loaded):
            # A mutant that removes `super()` still refers to its class, as the code does that it replaces.
            function.body.append(ast.Expr(ast.Name("__class__", ast.Load())))
            ast.fix_missing_locations(tree)
        new = next(
            code
            for code in codes(tree, str((self._root / found.module).resolve()))
            if (code.co_qualname, code.co_firstlineno) == (name, lineno)
        )
        if any(each.__code__.co_freevars != new.co_freevars for each in loaded):
            raise CannotSwap(f"the mutant of {name} uses other variables of the code around it")
        for each in loaded:
            each.__code__ = new


def codes(tree: ast.Module, filename: str) -> Iterator[CodeType]:
    """The code objects of all functions and classes of a module."""
    left = [compile(tree, filename, "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        yield code
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
