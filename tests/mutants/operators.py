"""What a mutant changes: the operators, and the nodes of a function that each of them can change.

    function ──sites──► node, in the order of the source ──replacements──► Change

Left out is what no test should notice, or what runs at import: annotations, decorators, defaults of
parameters, texts, and what is logged.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
LONGEST_TEXT = 160
LEFT_OUT = {
    "annotation",
    "returns",
    "decorator_list",
    "defaults",
    "kw_defaults",
    "type_params",
    "msg",
    "format_spec",
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
TEXTS = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict)


@dataclass(frozen=True)
class Change:
    """One change of one node. The index counts the nodes of the function in the order of the source."""

    operator: str
    index: int
    lineno: int
    end_lineno: int
    before: str
    after: str


@dataclass(frozen=True)
class Site:
    """A node, and where its parent holds it."""

    node: ast.AST
    parent: ast.AST
    field: str
    position: int | None

    def put(self, new: ast.AST) -> None:
        for each in ast.walk(new):
            if not hasattr(each, "lineno"):
                ast.copy_location(each, self.node)
        if self.position is None:
            setattr(self.parent, self.field, new)
        else:
            getattr(self.parent, self.field)[self.position] = new


def sites(function: Function) -> Iterator[Site]:
    """The nodes in the body of a function, parents first."""
    for position, statement in enumerate(function.body):
        yield from _below(Site(statement, function, "body", position))


def _below(site: Site) -> Iterator[Site]:
    if isinstance(site.node, ast.JoinedStr) or _is_logged(site.node) or _is_text(site.node):
        return
    yield site
    for field, value in ast.iter_fields(site.node):
        if field in LEFT_OUT:
            continue
        if isinstance(value, ast.AST):
            yield from _below(Site(value, site.node, field, None))
        elif isinstance(value, list):
            for position, each in enumerate(value):
                if isinstance(each, ast.AST):
                    yield from _below(Site(each, site.node, field, position))


def _is_logged(node: ast.AST) -> bool:
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and ast.unparse(called.value).endswith(("logger", "logging"))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def changes(function: Function) -> Iterator[Change]:
    """Every change that the operators make in a function."""
    for index, site in enumerate(sites(function)):
        for operator, new in _replacements(site):
            yield _change(operator, index, site.node, new)


def change(function: Function, wanted: Change) -> None:
    """Make this change in the function's tree."""
    site = list(sites(function))[wanted.index]
    for operator, new in _replacements(site):
        if _change(operator, wanted.index, site.node, new) == wanted:
            site.put(new)
            return
    raise LookupError(f"the function has no change {wanted}")


def _change(operator: str, index: int, node: ast.AST, new: ast.AST) -> Change:
    lineno, end_lineno = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return Change(operator, index, lineno, end_lineno, _text(node), _text(new))


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def _replacements(site: Site) -> Iterator[tuple[str, ast.AST]]:
    node = site.node
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    elif isinstance(node, ast.expr):
        yield from _of_expression(node)
        condition = site.field == "test" or (
            isinstance(site.parent, ast.comprehension) and site.field == "ifs"
        )
        if condition and not _has_its_own_negation(node):
            yield "negated condition", ast.UnaryOp(ast.Not(), node)


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Break():
            yield "break to continue", ast.Continue()
        case ast.Continue():
            yield "continue to break", ast.Break()
        case ast.Return(value=ast.expr() as value) if not _is_none_or_bool(value):
            yield "returned None", ast.Return(ast.Constant(None))
        case ast.AugAssign(target=target, op=op, value=value):
            yield "removed statement", ast.Pass()
            if type(op) in ARITHMETIC:
                yield "arithmetic", ast.AugAssign(target, ARITHMETIC[type(op)](), value)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Raise() | ast.Delete():
            yield "removed statement", ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "removed call", ast.Pass()


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for number, op in enumerate(ops):
                others = [*ops[:number], COMPARISONS[type(op)](), *ops[number + 1 :]]
                yield "comparison", ast.Compare(left, others, comparators)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not _joins_texts(node):
            yield "arithmetic", ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            yield "and, or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "removed not", operand
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "arithmetic", operand
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", ast.Constant(value + 1)
            yield (
                "constant",
                ast.Constant(value - 1) if value >= 1 else ast.UnaryOp(ast.USub(), ast.Constant(1 - value)),
            )
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in CALLS:
            yield "min, max, any, all", ast.Call(ast.Name(CALLS[name], ast.Load()), args, keywords)


def _has_its_own_negation(node: ast.expr) -> bool:
    """The operators "comparison" and "removed not" negate these."""
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and not isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_none_or_bool(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _joins_texts(node: ast.BinOp) -> bool:
    """Texts and lists only know `+`, `*` and `%`: another operator always raises TypeError."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, TEXTS) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )
