"""The filters and tests that chat templates may use: Jinja's, as far as they hold the bounds, and others in
place of the rest."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import Environment, TemplateError, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, ignore_case, make_attrgetter
from jinja2.tests import TESTS

from gateway.language.own.bounds import BOUNDS, compared, counted, searched, spend_size, text_of

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
