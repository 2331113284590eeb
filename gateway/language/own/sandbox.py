"""Runs a model's chat template, a Jinja program, with bounds on its time and on the text that it makes.

template ──parse──▶ tree ──LoopGuards──▶ tree that looks at the clock in every loop ──▶ Template
"""

import json
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import BuiltinMethodType
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rollout_queue import clock

RENDER_S: Final = 5.0
"""A template that takes longer is stopped at its next loop, look-up, call, filter or operator."""
MAX_WHOLE = 2**63
"""The largest factor of a product, so that no number has many digits."""
MAX_INDENT = 16
FILTERS_AS_THEY_ARE = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items"),
    *("last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round"),
    *("select", "selectattr", "sort", "title", "trim", "unique", "upper"),
)
"""Jinja's filters whose result is not larger than what they are given. The sandbox has a few more."""
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


@dataclass
class Bounds:
    """What one run of a template may still use."""

    deadline: float
    characters: int
    """Of all texts, and items of all lists, that the run makes on its way."""

    def check(self) -> None:
        """Raise SecurityError if the time is over."""
        if clock.monotonic() > self.deadline:
            raise SecurityError(f"it takes more than {RENDER_S:g} s")

    def spend(self, characters: int) -> None:
        """Count characters, before they are made. Raises SecurityError for too many."""
        self.characters -= characters
        if self.characters < 0:
            raise SecurityError("it makes far more text than the messages have")


BOUNDS: ContextVar[Bounds] = ContextVar("BOUNDS")
"""The bounds of the run in this thread."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as `transformers` sets it up for chat templates, with bounds."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed when the template is compiled
            finalize=_printable,
            extensions=[loopcontrols, GenerationTag],
        )
        self.filters = {name: _bounded(FILTERS[name]) for name in FILTERS_AS_THEY_ARE}
        self.filters |= {name: _bounded(made) for name, made in OWN_FILTERS.items()}
        self.filters["join"] = _bounded(self.joined)
        kept = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals = {**kept, "raise_exception": _raise, "strftime_now": time.strftime}

    def guarded(self, source: str) -> Template:
        """The template, with a look at the clock in every loop. Raises TemplateError if it is not valid."""
        tree = LoopGuards().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def check(self) -> str:
        """Raise SecurityError if the template has used its time."""
        BOUNDS.get().check()
        return ""

    def concatenated(self, *values: Any) -> str:
        """The texts of the values, one after the other: what `~` makes."""
        return self.concat(map(_text, values))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The parts as one text."""
        held = list(parts)
        BOUNDS.get().spend(sum(map(len, held)))
        return "".join(held)

    def joined(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        """The texts of a list's items, with `d` between them."""
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        return _joined(_text(d), [_text(item) for item in items])

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check()
        found = super().getitem(obj, argument)
        return _counted(found) if isinstance(argument, slice) else found

    def wrap_str_format(self, value: Any) -> None:
        """Leave `format` to `call`, which refuses it."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.check()
        if isinstance(__obj, BuiltinMethodType) and __obj is not time.strftime:
            owner, name = getattr(__obj, "__self__", None), __obj.__name__
            if not any(isinstance(owner, kind) and name in known for kind, known in METHODS.items()):
                raise SecurityError(f"it may not call {name}")
            if isinstance(owner, str) and name == "join":
                return __self.joined(args[0], owner)
            if isinstance(owner, str) and name == "replace":
                return _replaced(owner, *args, **kwargs)
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check()
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        if operator == "**" or (operator == "%" and sizes):
            raise SecurityError(f"it may not compute this with {operator}")
        if operator == "+":
            BOUNDS.get().spend(sum(sizes))
        elif operator == "*" and sizes:
            times = right if isinstance(left, str | list | tuple) else left
            BOUNDS.get().spend(sizes[0] * max(0, times) if isinstance(times, int) else 0)
        elif any(isinstance(side, int) and abs(side) > MAX_WHOLE for side in (left, right)):
            raise SecurityError("it computes with too large numbers")
        return super().call_binop(context, operator, left, right)


class LoopGuards(NodeTransformer):
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


class GenerationTag(Extension):
    """The tag `generation`, with which templates mark the assistant's text for training: its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _call_of(method: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    # No name that a template could set: the environment's own attribute.
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None, lineno=lineno)


def _bounded(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        BOUNDS.get().check()
        return _counted(made(*args, **kwargs))

    return bounded


def _counted(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        BOUNDS.get().spend(len(value))
    return value


@pass_context
def _printable(_: Context, value: Any) -> Any:
    """The value as it is printed. Jinja computes nothing beforehand if this function takes the context."""
    return _text(value) if isinstance(value, dict | list | tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    _spend_size(value)
    return str(value)


def _spend_size(value: Any) -> None:
    """Count the text of a value item by item: a list that holds itself twice, many times over, is short."""
    bounds, left = BOUNDS.get(), [value]
    while left:
        each = left.pop()
        if not isinstance(each, str):
            bounds.check()
        bounds.spend(len(each) + 1 if isinstance(each, str) else 1)
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each


def _joined(between: str, texts: list[str]) -> str:
    BOUNDS.get().spend(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _replaced(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    whole, old, new = _text(text), _text(old), _text(new)
    BOUNDS.get().spend(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


def _indented(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, MAX_INDENT)
    lines = _text(text).splitlines() or [""]
    BOUNDS.get().spend(len(lines) * len(margin))
    rest = [margin + line if line or blank else line for line in lines[1:]]
    return "\n".join([margin + lines[0] if first else lines[0], *rest])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    _spend_size(value)
    if (indent or 0) > MAX_INDENT or any(len(each) > MAX_INDENT for each in separators or ()):
        raise SecurityError("it writes JSON with too much space")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "indent": _indented,
    "replace": _replaced,
    "safe": _text,
    "string": _text,
    "tojson": _tojson,
}
"""Filters that the sandbox has in place of Jinja's, which have no bounds."""
