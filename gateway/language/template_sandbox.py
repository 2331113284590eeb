"""Runs a model's chat template, a Jinja program, with bounds on its time and on the text that it makes.

template ──parse──▶ tree ──TemplateGuards──▶ tree that looks at the clock in every loop ──▶ Template

What one run of a chat template may still use: its time, and the characters that it makes on its way.

The filters and tests that chat templates may use: Jinja's, as far as they hold the bounds, and others in
place of the rest.
"""

import json
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from time import thread_time
from types import BuiltinMethodType
from typing import Any, Final

from jinja2 import Environment, Template, TemplateError, nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, ignore_case, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

RENDER_S: Final = 5.0
"""A template that takes more CPU time is stopped at its next loop, look-up, call, filter or operator."""
VIEWS: Final = (KeysView, ValuesView, ItemsView)
"""What `keys`, `values` and `items` of a dictionary return."""


@dataclass
class Bounds:
    """What one run of a template may still use."""

    deadline: float
    """By the CPU time of this thread, so that a standstill of the machine counts for nothing."""
    characters: int
    """Of all texts, and items of all lists, that the run makes on its way."""

    def check(self) -> None:
        """Raise SecurityError if the time is over."""
        if thread_time() > self.deadline:
            raise SecurityError(f"it takes more than {RENDER_S:g} s")

    def spend(self, characters: int) -> None:
        """Count characters, before they are made. Raises SecurityError for too many."""
        self.characters -= characters
        if self.characters < 0:
            raise SecurityError("it makes far more text than the messages have")


BOUNDS: ContextVar[Bounds] = ContextVar("BOUNDS")
"""The bounds of the run in this thread."""


def counted(value: Any) -> Any:
    """The value, whose characters or items are counted."""
    if isinstance(value, str | list | tuple):
        BOUNDS.get().spend(len(value))
    return value


def text_of(value: Any) -> str:
    """The value as text, which is counted before it is made."""
    if isinstance(value, str):
        return value
    spend_size(value)
    return str(value)


def compared(value: Any) -> Any:
    """The value, which is about to be compared, or hashed. Python does that item by item and looks at no
    clock meanwhile. So the items are counted first."""
    if not isinstance(value, str | int | float | None):
        value = listed(value)
        spend_size(value)
    return value


def searched(value: Any) -> Any:
    """The value, in which something is about to be looked up."""
    return value if isinstance(value, dict | KeysView | ItemsView) else compared(value)


def listed(value: Any) -> Any:
    """The value, or the items that it yields: they can be counted."""
    return counted(list(value)) if isinstance(value, Iterator) else value


def spend_size(value: Any) -> None:
    """Count the text of a value item by item: a list that holds itself twice, many times over, is short."""
    bounds, left = BOUNDS.get(), [value]
    while left:
        each = left.pop()
        if not isinstance(each, str):
            bounds.check()
        bounds.spend(len(each) + 1 if isinstance(each, str) else 1)
        if isinstance(each, Namespace):
            each = object.__getattribute__(each, "_Namespace__attrs")
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, *VIEWS)):
            left += each


MAX_INDENT = 16
MAX_SORT_KEYS = 16
MAX_DIGITS = 64
"""Behind or before the point, to which a number is rounded: Python computes the power of ten first."""
AS_THEY_ARE = (
    *("abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length", "list"),
    *("map", "reject", "rejectattr", "reverse", "select", "selectattr"),
)
"""Jinja's filters whose result is not larger than what they are given, and that compare nothing."""
OF_TEXT = ("capitalize", "lower", "title", "upper")
COMPARING = ("dictsort", "max", "min", "sort")
COMPARING_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan"),
    *("<=", "le"),
)
NUMBER_TESTS = ("odd", "even", "divisibleby")
MAX_STRIPPED = 256
"""Characters that are stripped, or looked for from the end: Python's time grows with the product of this
number and the text's length."""


def filters_of(environment: Environment) -> dict[str, Callable[..., Any]]:
    """All filters by name. `environment`: whose look-ups they use."""

    def joined(value: Any, d: Any = "", attribute: Any = None) -> str:
        items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
        return joined_texts(text_of(d), [text_of(item) for item in items])

    made = {name: FILTERS[name] for name in AS_THEY_ARE}
    made |= {name: _of_text(FILTERS[name]) for name in OF_TEXT}
    made |= {name: _comparing(FILTERS[name]) for name in COMPARING}
    return {name: _bounded(each) for name, each in (made | OWN_FILTERS | {"join": joined}).items()}


def tests_of() -> dict[str, Callable[..., Any]]:
    """All tests by name."""
    made: dict[str, Any] = {**TESTS}
    made |= {name: _of_text(made[name]) for name in ("lower", "upper")}
    made |= {name: _of_number(made[name]) for name in NUMBER_TESTS}
    made |= {name: _of_compared(made[name]) for name in COMPARING_TESTS}
    return made | {"in": lambda value, seq: compared(value) in searched(seq)}


def joined_texts(between: str, texts: list[str]) -> str:
    """The texts, with another one between them."""
    BOUNDS.get().spend(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def replaced(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    whole, old, new = text_of(text), text_of(old), text_of(new)
    BOUNDS.get().spend(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


def check_stripped(given: Any) -> None:
    """Raises SecurityError for more characters than are stripped or looked for from the end."""
    if isinstance(given, str) and len(given) > MAX_STRIPPED:
        raise SecurityError(f"it strips or looks for more than {MAX_STRIPPED} characters")


def dict_of(given: Any = (), /, **named: Any) -> dict[Any, Any]:
    """`dict`, with a look at the clock for each key: many keys may have the same hash."""
    made = {}
    for key, value in given.items() if isinstance(given, Mapping) else given:
        BOUNDS.get().check()
        made[compared(key)] = value
    return made | named


def _bounded(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        BOUNDS.get().check()
        return counted(made(*args, **kwargs))

    return bounded


def _of_text(made: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(made)(lambda value, *args: made(text_of(value), *args))


def _of_number(made: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(made)
    def tested(value: Any, *args: Any) -> bool:
        if not isinstance(value, int | float):
            raise TemplateError(f"{type(value).__name__} is no number")
        return made(value, *args)

    return tested


def _of_compared(made: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, other: made(compared(value), compared(other))


def _comparing(made: Callable[..., Any]) -> Callable[..., Any]:
    """Counts all that a filter compares. Jinja gives some of these filters the environment first."""
    at = int(hasattr(made, "jinja_pass_arg"))

    @wraps(made)
    def comparing(*args: Any, **kwargs: Any) -> Any:
        given = [*args[:at], compared(args[at]), *args[at + 1 :]]
        named = [each for each in (*args[at + 1 :], *kwargs.values()) if isinstance(each, str)]
        if any(each.count(",") >= MAX_SORT_KEYS for each in named):
            raise SecurityError(f"it sorts by more than {MAX_SORT_KEYS} keys")
        return made(*given, **kwargs)

    return comparing


@pass_environment
def _unique(
    environment: Environment, value: Iterable[Any], case_sensitive: bool = False, attribute: Any = None
) -> Iterator[Any]:
    """Looks at the clock for each item: many items may have the same hash."""
    key_of = make_attrgetter(environment, attribute, postprocess=None if case_sensitive else ignore_case)
    seen = set()
    for item in value:
        BOUNDS.get().check()
        key = compared(key_of(item))
        if key not in seen:
            seen.add(key)
            yield item


def _rounded(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > MAX_DIGITS:
        raise SecurityError(f"it rounds to more than {MAX_DIGITS} digits")
    return FILTERS["round"](value, precision, method)


def _trimmed(value: Any, chars: str | None = None) -> str:
    check_stripped(chars)
    return text_of(value).strip(chars)


def _indented(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, MAX_INDENT)
    lines = text_of(text).splitlines() or [""]
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
    spend_size(value)
    if (indent or 0) > MAX_INDENT or any(len(each) > MAX_INDENT for each in separators or ()):
        raise SecurityError("it writes JSON with too much space")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "indent": _indented,
    "replace": replaced,
    "round": _rounded,
    "safe": text_of,
    "string": text_of,
    "tojson": _tojson,
    "trim": _trimmed,
    "unique": _unique,
}
"""Filters that the sandbox has in place of Jinja's, which have no bounds."""


MAX_WHOLE = 2**63
"""The largest factor of a product, so that no number has many digits."""
MAX_PAIRS = 1000
"""Of one dictionary that the template writes out."""
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
COMPARING_METHODS = ("count", "get", "index")
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
            if name in COMPARING_METHODS:
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
