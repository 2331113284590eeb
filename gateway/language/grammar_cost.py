"""Holds what the grammar of an answer costs the engine's compiler within a budget.

The compiler reads the vocabulary from each state of the grammar. Names, types and enums have few states, or
such as few tokens begin in; `MAX_BYTES` and `MAX_PARTS` of `schema` bound them. What unrolls into many states
is estimated here, by figures that `bench/grammars.py` measures with the engine's own library.

forms of an answer ──▶ costs ─┬─ within the budget ──▶ as they are
                              ├─ without what only `strict` needs ──▶ schemas with fewer bounds
                              └─ else ──▶ 400 that names the costliest part

Estimates what a regular expression costs the engine's compiler: how often it reads the vocabulary.

pattern ──▶ tree ──unrolled──▶ positions, and which follow which ──▶ how many are active while tokens are read

The compiler reads each token from each position. Its time grows with the positions at which it then is at the
same time: one in `[a-z]{9}`, dozens in `([a-z]{1,9}){9}`, because a text can be read in dozens of ways.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec

from gateway.errors import InvalidRequest, invalid
from gateway.language.call_syntax import (
    Alternatives,
    Format,
    FormatOrigin,
    JsonFormat,
    OptionalFormat,
    Pattern,
    Repeated,
    SequenceFormat,
    StructuralTag,
)
from gateway.language.schema import (
    NAMED_SCHEMAS,
    PATTERN_PART,
    VALUES,
    JsonSchema,
    check_patterns,
    check_size,
    parts_of,
    patterns_of,
)
from rollout_queue.http.json_routes import takes_long

KINDS: Final = {"e": 0.35, "E": 0.1, " ": 0.25, "0": 0.05, "中": 0.25}
"""A character of each kind, and the share of a vocabulary's tokens that go on with such characters."""
DEPTH: Final = 8
"""How many characters of a token are read: most have no more."""
STARTS: Final = 16
"""From how many positions tokens are read; the cost of the others is that of these."""
MOST_ACTIVE: Final = 40_000
"""Where the estimate stops, so that it takes a few hundredths of a second at most."""
AMBIGUITY: Final = 1.2
"""The exponent with which the time grows with the active positions."""


@dataclass(frozen=True)
class Part:
    """A part of a pattern with its positions, which are bits of numbers."""

    first: int = 0
    last: int = 0
    nullable: bool = True
    """Whether it matches the empty text."""


@lru_cache(maxsize=2048)
def steps_of(pattern: str) -> float:
    """How many steps the compiler takes for a token of average length from all positions; infinite for a
    pattern that is too complex to estimate."""
    takes_long()
    try:
        follows, atoms = _positions(pattern)
    except RecursionError:
        return float("inf")
    if not atoms:
        return 0.0
    matching = {kind: _matching(atoms, kind) for kind in KINDS}
    starts = list(range(0, len(follows), max(1, len(follows) // STARTS)))
    steps, active = 0.0, 0
    for start in starts:
        for kind, share in KINDS.items():
            here = 1 << start
            for _ in range(DEPTH):
                here = _next(follows, here) & matching[kind]
                if not here:
                    break
                active += here.bit_count()
                steps += share * here.bit_count() ** AMBIGUITY
                if active > MOST_ACTIVE:
                    return float("inf")
    return steps * len(follows) / len(starts)


def _next(follows: list[int], here: int) -> int:
    found = 0
    for position in _bits(here):
        found |= follows[position]
    return found


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _matching(atoms: list[str], kind: str) -> int:
    found = 0
    for position, atom in enumerate(atoms):
        if _matches(atom, kind):
            found |= 1 << position
    return found


@lru_cache(maxsize=1024)
def _matches(atom: str, character: str) -> bool:
    if len(atom) == 1 and atom != ".":
        return atom == character
    try:
        return re.fullmatch(atom, character, re.DOTALL) is not None
    except re.error:
        return True


def _positions(pattern: str) -> tuple[list[int], list[str]]:
    """For each position those that may follow it, and the atoms of all positions."""
    follows: list[int] = []
    atoms: list[str] = []
    _Builder(follows, atoms).alternatives(_parsed(pattern))
    return follows, atoms


Node = tuple[str, "list[list[Repeat]] | str"]
"""An atom, or the alternatives of a group."""
Repeat = tuple[Node, int, int | None]
"""A node, and how often it stands there: at least, and at most."""


def _parsed(pattern: str) -> "list[list[Repeat]]":
    """The alternatives of a pattern. A bracket without its counterpart is left out."""
    open_groups: list[list[list[Repeat]]] = [[[]]]
    for part in PATTERN_PART.finditer(pattern):
        here = open_groups[-1][-1]
        if part["quantifier"]:
            if here:
                here[-1] = _repeated(here[-1], part)
        elif part["begin"]:
            open_groups.append([[]])
        elif part["end"]:
            if len(open_groups) > 1:
                group = open_groups.pop()
                open_groups[-1][-1].append((("group", group), 1, 1))
        elif part["or"]:
            open_groups[-1].append([])
        elif not part["empty"]:
            here.append((("atom", part[0]), 1, 1))
    while len(open_groups) > 1:
        group = open_groups.pop()
        open_groups[-1][-1].append((("group", group), 1, 1))
    return open_groups[0]


def _repeated(node: Repeat, part: re.Match[str]) -> Repeat:
    simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    low, high = simple.get(part["quantifier"], (0, 0))
    if part["quantifier"] not in simple:
        low = int(part["low"] or 0)
        high = (int(part["high"]) if part["high"] else None) if part["comma"] else low
    if node[1:] == (1, 1):
        return (node[0], low, high)
    return (("group", [[node]]), low, high)


class _Builder:
    """Unrolls a tree into positions."""

    def __init__(self, follows: list[int], atoms: list[str]) -> None:
        self._follows, self._atoms = follows, atoms

    def alternatives(self, several: "list[list[Repeat]]") -> Part:
        first = last = 0
        nullable = False
        for each in several:
            part = self._sequence([self._repeat(node) for node in each])
            first, last, nullable = first | part.first, last | part.last, nullable or part.nullable
        return Part(first, last, nullable)

    def _repeat(self, repeated: Repeat) -> Part:
        node, low, high = repeated
        copies = [self._once(node)]
        if not copies[0].first:  # nothing but empty texts, however often
            return copies[0]
        copies += [self._once(node) for _ in range(1, max(low, high or 0))]
        if high is None:
            self._join(copies[-1].last, copies[-1].first)
            return self._sequence([*copies[:-1], Part(copies[-1].first, copies[-1].last, nullable=low == 0)])
        # Each copy after the first `low` ones may be the last; none is skipped, unless all may be empty.
        skips = all(copy.nullable for copy in copies)
        optional = [Part(copy.first, copy.last, nullable=skips or copy.nullable) for copy in copies]
        part = self._sequence(optional)
        ends = 0
        for copy in copies[max(0, low - 1) :]:
            ends |= copy.last
        return Part(part.first, part.last | ends, part.nullable or low == 0)

    def _once(self, node: Node) -> Part:
        kind, content = node
        if kind == "atom" and isinstance(content, str):
            self._atoms.append(content)
            self._follows.append(0)
            here = 1 << (len(self._atoms) - 1)
            return Part(here, here, nullable=False)
        return self.alternatives(content) if isinstance(content, list) else Part()

    def _sequence(self, parts: list[Part]) -> Part:
        coming, last = 0, 0
        for part in reversed(parts):
            self._join(part.last, coming)
            coming = part.first | (coming if part.nullable else 0)
        for part in parts:
            last = part.last | (last if part.nullable else 0)
        return Part(coming, last, all(part.nullable for part in parts))

    def _join(self, last: int, first: int) -> None:
        for position in _bits(last):
            self._follows[position] |= first


MOST_S: Final = 4.0
"""CPU seconds for all parts of a grammar together, beside what its bytes cost, which is about as much."""
LENGTH_S: Final = 4.5e-7
"""For each state of a string of bounded length, and each token of the vocabulary."""
STEP_S: Final = 3.1e-8
"""For each step of a pattern, and each token of the vocabulary."""
LONG_BYTES: Final = 8 * 2**10
"""What the parts of a larger grammar cost takes milliseconds to count."""
WHOLE_ANSWER: Final = 2
"""A pattern of the whole answer costs this many times what it costs in a schema."""
EDGE_S: Final = 8e-7
"""For each two optional properties of an object."""
COUNTED: Final = 25
"""An object whose properties are counted costs `EDGE_S` for so many triples, for each number of them."""
UNROLLED: Final = 128
"""Of a longer string, only so many characters become states of their own, at its end and at its beginning."""
FORMAT_STATES: Final = {"email": 2.0, "uri": 1.5, "uri-reference": 1.5, "hostname": 1.0, "uri-template": 5.0}
"""What formats of strings cost, in states of a string of bounded length. Others cost half a state."""
LEFT_OUT: Final = (frozenset({"minLength", "maxLength"}), frozenset({"format"}))
"""What a schema that is not strict does without, if it costs too much: first these, then those as well."""

CostKey = tuple[Any, ...]
"""The kind of a cost, and what makes it the same as another one of this kind."""


@dataclass(frozen=True)
class FormatCost:
    """What one part of a grammar costs."""

    seconds: float
    origin: FormatOrigin
    what: str
    """The part, for the caller."""


@dataclass(frozen=True)
class FittedForm:
    """A form that can be compiled in bounded time."""

    form: Format
    left_out: tuple[str, ...] = ()
    """The bounds that the grammar does without."""


def fitted_tag(form: Format, param: str, vocab_size: int) -> tuple[str, tuple[str, ...]]:
    """The form as JSON for the engine, and the bounds that it does without.

    Raises InvalidRequest as `fitted`, and for too many bytes or patterns; then the error names `param`.
    """
    tag = _encoded(_without_origins(form))
    check_size(tag, param)
    check_patterns(tag, param)
    if len(tag) > LONG_BYTES:
        takes_long()
    kept = fitted(form, vocab_size)
    return _encoded(kept.form).decode(), kept.left_out


def fitted(form: Format, vocab_size: int) -> FittedForm:
    """The form, as far as an engine with this vocabulary can compile it in bounded time.

    Raises InvalidRequest if it cannot.
    """
    if _seconds(form, vocab_size) <= MOST_S:
        return FittedForm(_without_origins(form))
    left_out: set[str] = set()
    for names in LEFT_OUT:
        form = _each(form, lambda each: _without_bounds(each, names, left_out))  # noqa: B023 - called at once
        if _seconds(form, vocab_size) <= MOST_S:
            return FittedForm(_without_origins(form), tuple(sorted(left_out)))
    raise _refusal(_costs(form, vocab_size), vocab_size)


def _encoded(form: Format) -> bytes:
    return msgspec.json.encode(StructuralTag(format=form))


def _without_origins(form: Format) -> Format:
    """The form as it is sent."""
    return _each(form, _without_origin)


def _refusal(costs: Mapping[CostKey, FormatCost], vocab_size: int) -> InvalidRequest:
    """The error for a grammar that costs too much. It names the costliest part of the costliest kind."""
    kinds = dict.fromkeys((kind for kind, *_ in costs), 0.0)
    for (kind, *_), cost in costs.items():
        kinds[kind] += cost.seconds
    costliest = max(kinds, key=kinds.__getitem__)
    worst = max((cost for key, cost in costs.items() if key[0] == costliest), key=lambda cost: cost.seconds)
    param, advice = worst.origin.param, "make it smaller"
    if worst.origin.strict and worst.what.startswith(("minLength", "maxLength", "format")):
        advice = "make it smaller, or leave out strict"
    return invalid(
        param,
        f"{worst.what} makes the grammar too complex to compile for a vocabulary of {vocab_size} "
        f"tokens: {advice}",
    )


def _seconds(form: Format, vocab_size: int) -> float:
    return sum(cost.seconds for cost in _costs(form, vocab_size).values())


def _costs(form: Format, vocab_size: int) -> dict[CostKey, FormatCost]:
    """The costs of the parts that differ: the compiler keeps what it has made. Above the budget, no further
    one is estimated."""
    found: dict[CostKey, FormatCost] = {}
    total = 0.0
    for key, cost in _costs_of_parts(form, vocab_size):
        total += 0.0 if key in found else cost.seconds
        found[key] = cost
        if total > MOST_S:
            break
    return found


def _costs_of_parts(form: Format, vocab_size: int) -> Iterator[tuple[CostKey, FormatCost]]:
    for each in _leaves(form):
        if isinstance(each, Pattern) and isinstance(each.origin, FormatOrigin):
            seconds = WHOLE_ANSWER * STEP_S * vocab_size * steps_of(each.pattern)
            named = _named("pattern", each.pattern)
            yield ("whole", each.pattern), FormatCost(seconds, each.origin, named)
        elif isinstance(each, JsonFormat) and isinstance(each.origin, FormatOrigin):
            for key, seconds, what in _schema_costs(each.json_schema, vocab_size):
                yield key, FormatCost(seconds, each.origin, what)


def _schema_costs(schema: JsonSchema, vocab_size: int) -> Iterator[tuple[CostKey, float, str]]:
    """What makes a cost the same as another one, its CPU seconds, and what it is of."""
    state_s = LENGTH_S * vocab_size
    for path, part in parts_of(schema):
        shortest, longest = _count(part.get("minLength")), _count(part.get("maxLength"))
        if shortest or longest is not None:
            name = "minLength" if longest is None else "maxLength"
            states = _states_of_length(shortest or 0, longest)
            yield ("length", shortest, longest), state_s * states, f"{name} of {path}"
        if isinstance(kind := part.get("format"), str):
            key = ("format", kind, path if kind == "uri-template" else "")
            yield key, state_s * FORMAT_STATES.get(kind, 0.5), f"format {kind[:32]!r} of {path}"
        for pattern in patterns_of(part):
            yield (
                ("pattern", pattern),
                STEP_S * vocab_size * steps_of(pattern),
                _named("pattern", pattern, path),
            )
        if pairs := _pairs_of_properties(part):
            yield ("properties", path, id(part)), EDGE_S * pairs, f"the number of properties of {path}"


def _states_of_length(shortest: int, longest: int | None) -> int:
    if longest is None:
        return min(shortest, UNROLLED)
    return longest if longest <= UNROLLED else UNROLLED + max(0, UNROLLED - shortest)


def _pairs_of_properties(part: JsonSchema) -> int:
    """The optional properties of an object, two by two; if they are counted, more."""
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, dict):
        return 0
    optional = len(properties) - (len(required) if isinstance(required, list) else 0)
    told_apart = max(_count(part.get("minProperties")) or 1, _count(part.get("maxProperties")) or 1)
    pairs = max(0, optional) ** 2
    if told_apart == 1:
        return pairs
    return pairs * optional * min(told_apart, len(properties)) // COUNTED


def _count(value: Any) -> int | None:
    """A bound as a number; None if there is none. The engine refuses what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        return None
    return max(0, int(value))


def _named(what: str, text: str, path: str = "") -> str:
    return f"{what} {text[:80]!r}" + (f" of {path}" if path else "")


def _leaves(form: Format) -> Iterator[Format]:
    if isinstance(form, SequenceFormat | Alternatives):
        for each in form.elements:
            yield from _leaves(each)
    elif isinstance(form, OptionalFormat | Repeated):
        yield from _leaves(form.content)
    else:
        yield form


def _each(form: Format, changed: Callable[[Format], Format]) -> Format:
    """The form with each of its leaves changed."""
    if isinstance(form, SequenceFormat | Alternatives):
        return msgspec.structs.replace(form, elements=[_each(each, changed) for each in form.elements])
    if isinstance(form, OptionalFormat | Repeated):
        return msgspec.structs.replace(form, content=_each(form.content, changed))
    return changed(form)


def _without_origin(form: Format) -> Format:
    if isinstance(form, JsonFormat | Pattern):
        return msgspec.structs.replace(form, origin=msgspec.UNSET)
    return form


def _without_bounds(form: Format, names: Set[str], left_out: set[str]) -> Format:
    """A schema that is not strict, without these bounds. `left_out` gets those that it had."""
    if not isinstance(form, JsonFormat) or not isinstance(form.origin, FormatOrigin) or form.origin.strict:
        return form
    return msgspec.structs.replace(form, json_schema=_without(form.json_schema, names, left_out))


def _without(schema: Any, names: Set[str], left_out: set[str]) -> Any:
    if isinstance(schema, list):
        return [_without(each, names, left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    left_out |= names & schema.keys()
    return {
        key: {name: _without(each, names, left_out) for name, each in inner.items()}
        if key in NAMED_SCHEMAS and isinstance(inner, dict)
        else inner
        if key in VALUES
        else _without(inner, names, left_out)
        for key, inner in schema.items()
        if key not in names
    }
