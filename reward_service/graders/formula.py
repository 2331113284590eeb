"""The formula of a `multi` grader: arithmetic on the scores of its graders.

text ── parse_formula ──▶ Formula ── value(scores) ──▶ float

The operators are + - * / ^ and the functions those of OpenAI. Python's parser reads the text, and only the
nodes below are evaluated; no Python is executed.
"""

import ast
import keyword
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from reward_service.graders.faults import FormulaUndefined, MalformedGrader

MAX_FORMULA_CHARS = 2000
MAX_FORMULA_NODES = 300
MAX_FORMULA_DEPTH = 100
"""A sum of n terms has n levels."""

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
"""`log` is the natural logarithm."""
OF_SEVERAL = frozenset({"min", "max"})
"""These functions take one argument or more; the others take one."""


def is_formula_name(name: str) -> bool:
    """Whether a formula can name a grader so."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


@dataclass(frozen=True)
class Formula:
    """A checked formula."""

    tree: ast.expr

    def value(self, scores: Mapping[str, float]) -> float:
        """A finite number. Raises FormulaUndefined."""
        try:
            value = float(_evaluate(self.tree, scores))
        except (ArithmeticError, ValueError) as error:
            raise FormulaUndefined(f"the formula has no value: {error}") from error
        if not math.isfinite(value):
            raise FormulaUndefined(f"the formula's value is {value}")
        return value


def parse_formula(text: str, names: Collection[str]) -> Formula:
    """`names`: the graders that the formula may name. Raises MalformedGrader."""
    if len(text) > MAX_FORMULA_CHARS:
        raise MalformedGrader(f"the formula is longer than {MAX_FORMULA_CHARS} characters")
    if "**" in text:
        raise MalformedGrader("the formula has **: a power is written with ^")
    try:
        # In Python ^ is another operator, of a lower rank than +.
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedGrader("the formula cannot be parsed") from error
    nodes = _check(tree, frozenset(names), MAX_FORMULA_DEPTH)
    if nodes > MAX_FORMULA_NODES:
        raise MalformedGrader(f"the formula has more than {MAX_FORMULA_NODES} parts")
    return Formula(tree)


def _check(node: ast.expr, names: frozenset[str], depth: int) -> int:
    """The number of nodes of the tree. Raises MalformedGrader for a node that is no arithmetic."""
    if depth == 0:
        raise MalformedGrader(f"the formula nests deeper than {MAX_FORMULA_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            inside: list[ast.expr] = []
        case ast.Name(id=name):
            if name not in names:
                raise MalformedGrader(f"the formula names {name!r}, and there is no such grader")
            inside = []
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            inside = [node.left, node.right]
        case ast.UnaryOp(op=sign) if type(sign) in SIGNS:
            inside = [node.operand]
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            inside = node.args
            if not inside or (len(inside) > 1 and name not in OF_SEVERAL):
                raise MalformedGrader(f"{name} does not take {len(inside)} arguments")
        case _:
            raise MalformedGrader(
                "the formula has something other than numbers, graders, + - * / ^ and the functions "
                + ", ".join(FUNCTIONS)
            )
    return 1 + sum(_check(each, names, depth - 1) for each in inside)


def _evaluate(node: Any, scores: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return scores[name]
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_evaluate(left, scores), _evaluate(right, scores))
        case ast.UnaryOp(op=sign, operand=operand):
            return SIGNS[type(sign)](_evaluate(operand, scores))
        case _:
            given = [_evaluate(each, scores) for each in node.args]
            name = node.func.id
            return FUNCTIONS[name](given) if name in OF_SEVERAL else FUNCTIONS[name](*given)
