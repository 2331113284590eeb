"""Runs a model's chat template, a Jinja program, with bounds on its time and on the text that it makes.

template ──parse──▶ tree ──TemplateGuards──▶ tree that looks at the clock in every loop ──▶ Template
"""

import time
from collections.abc import Iterable
from types import BuiltinMethodType
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from gateway.language.own.bounds import BOUNDS, VIEWS, compared, counted, searched, text_of
from gateway.language.own.filters import (
    check_stripped,
    dict_of,
    filters_of,
    joined_texts,
    replaced,
    tests_of,
)

MAX_WHOLE = 2**63
"""The largest factor of a product, so that no number has many digits."""
MAX_PAIRS = 1000
"""Of one dictionary that the template writes out: many keys may have the same hash."""
COMPARED: Final = "(compared)"
SEARCHED: Final = "(searched)"
"""Filters that count what is about to be compared, or searched. No template can write these names."""
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower"),
            *("isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition", "removeprefix"),
            *("removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split"),
            *("splitlines", "startswith", "strip", "title", "upper"),
        )
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
"""The methods that a template may call, by the type of their object."""
COMPARING = ("count", "get", "index")
"""Methods that compare their argument, or hash it."""
FROM_THE_ENDS = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip")
"""Methods whose time grows with the product of the lengths of text and argument."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as `transformers` sets it up for chat templates, with bounds."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed when the template is compiled
            finalize=_printable,
            extensions=[loopcontrols, GenerationTag],
        )
        self.filters = filters_of(self) | {COMPARED: compared, SEARCHED: searched}
        self.tests.update(tests_of())
        made = {"range": self.globals["range"], "dict": dict_of, "namespace": _namespace}
        self.globals = {**made, "raise_exception": _raise, "strftime_now": time.strftime}

    def guarded(self, source: str) -> Template:
        """The template, with a look at the clock in every loop. Raises TemplateError if it is not valid."""
        tree = TemplateGuards().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def check(self) -> str:
        """Raise SecurityError if the template has used its time."""
        BOUNDS.get().check()
        return ""

    def concatenated(self, *values: Any) -> str:
        """The texts of the values, one after the other: what `~` makes."""
        return self.concat(map(text_of, values))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The parts as one text."""
        held = list(parts)
        BOUNDS.get().spend(sum(map(len, held)))
        return "".join(held)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check()
        found = super().getitem(obj, compared(argument))
        return counted(found) if isinstance(argument, slice) else found

    def wrap_str_format(self, value: Any) -> None:
        """Leave `format` to `call`, which refuses it."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.check()
        if isinstance(__obj, BuiltinMethodType) and __obj is not time.strftime:
            owner, name = getattr(__obj, "__self__", None), __obj.__name__
            if not any(isinstance(owner, kind) and name in known for kind, known in METHODS.items()):
                raise SecurityError(f"it may not call {name}")
            if isinstance(owner, str) and name == "join":
                return joined_texts(owner, [text_of(each) for each in args[0]])
            if isinstance(owner, str) and name == "replace":
                return replaced(owner, *args, **kwargs)
            if name in COMPARING:
                compared(owner if isinstance(owner, list | tuple) else None)
                compared(args)
            if name in FROM_THE_ENDS:
                check_stripped(args[0] if args else kwargs.get("sep"))
        elif isinstance(getattr(__obj, "__self__", None), LoopContext):
            compared(args)  # `loop.changed` compares them with the former ones
        return counted(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check()
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        views = isinstance(left, VIEWS) or isinstance(right, VIEWS)
        if operator == "**" or (operator == "%" and sizes) or (operator == "-" and views):
            raise SecurityError(f"it may not compute this with {operator}")
        if operator == "+":
            BOUNDS.get().spend(sum(sizes))
        elif operator == "*" and sizes:
            times = right if isinstance(left, str | list | tuple) else left
            BOUNDS.get().spend(sizes[0] * max(0, times) if isinstance(times, int) else 0)
        elif operator in "*%" and any(
            isinstance(side, int) and abs(side) > MAX_WHOLE for side in (left, right)
        ):
            raise SecurityError("it computes with too large numbers")
        return super().call_binop(context, operator, left, right)


class TemplateGuards(NodeTransformer):
    """Adds the calls that hold a template's bounds."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Look at the clock in every round: a loop may do nothing else that does."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call_of("check", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Count what `~` makes: doubled in a loop, a text soon fills the memory."""
        self.generic_visit(node)
        return _call_of("concatenated", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Count what is compared: lists that hold themselves twice, many times over, take hours."""
        self.generic_visit(node)
        node.expr = _filtered(COMPARED, node.expr)
        for operand in node.ops:
            looks_up = operand.op in ("in", "notin") and len(node.ops) == 1
            operand.expr = _filtered(SEARCHED if looks_up else COMPARED, operand.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        """Count what is hashed."""
        self.generic_visit(node)
        if len(node.items) > MAX_PAIRS:
            raise TemplateAssertionError(f"a dictionary has more than {MAX_PAIRS} keys", node.lineno)
        for pair in node.items:
            pair.key = _filtered(COMPARED, pair.key)
        return node


class GenerationTag(Extension):
    """The tag `generation`, with which templates mark the assistant's text for training: its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _call_of(method: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    # No name that a template could set: the environment's own attribute.
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None, lineno=lineno)


def _filtered(name: str, value: nodes.Expr) -> nodes.Expr:
    constant = isinstance(value, nodes.Const)
    return value if constant else nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


@pass_context
def _printable(_: Context, value: Any) -> Any:
    """The value as it is printed. Jinja computes nothing beforehand if this function takes the context."""
    return text_of(value) if isinstance(value, (dict, list, tuple, Namespace, *VIEWS)) else value


def _namespace(given: Any = (), /, **named: Any) -> Namespace:
    return Namespace(dict_of(given, **named))


def _raise(message: str) -> None:
    raise TemplateError(message)
