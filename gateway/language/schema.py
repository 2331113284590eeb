"""Checks that an engine can compile a JSON schema in bounded time, and enforce it if it is `strict`."""

import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import msgspec

from gateway.errors import invalid

JsonSchema = dict[str, Any]

NAME = re.compile(r"[\w.:/-]{1,128}")
"""The names of functions that a grammar can have."""
MAX_BYTES = 64 * 1024
"""An engine compiles a schema of this size in three seconds at most, without what
`grammar_cost.py` counts."""
MAX_DEPTH = 64
"""Levels of the schema's own JSON. xgrammar compiles 60 nested objects quickly, but 480 in forty seconds."""
MAX_PARTS = 1000
"""The most schemas inside one schema; each property counts as one."""
MAX_NAME = 64
"""Characters of a name in a path of an error."""
MAX_PATTERN = 512
MAX_QUANTIFIERS = 64
MAX_STATES = 10_000
"""Limits of a pattern: its characters, its quantifiers, and the states of its automaton once the counts are
unrolled; the last one also limits all patterns of a grammar together. A compiler that unrolls
`(.{0,1000}){0,1000}` cannot be stopped: it occupies a core until the engine restarts."""
PATTERN_PART = re.compile(
    r"(?P<quantifier>[*+?]|\{(?P<low>\d*)(?P<comma>,)?(?P<high>\d*)\})|(?P<begin>\()|(?P<end>\))"
    r"|(?P<or>\|)|(?P<empty>\?:|[\^$])|\\.|\[(?:\\.|[^\]\\])*\]|.",
    re.DOTALL,
)
"""Matches one element of a pattern: a quantifier, a bracket, a sign that matches no character (such as `^`),
or an atom, which matches one character."""
UNENFORCED = frozenset(
    {
        *("contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas"),
        *("if", "then", "else", "multipleOf", "not", "uniqueItems"),
    }
)
"""Keywords that xgrammar ignores. It also ignores an `allOf` with several schemas. A `strict` schema may have
none of these; other schemas are enforced as far as possible."""
BRANCHES = ("allOf", "anyOf", "oneOf")
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose values map names to schemas."""
VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are data, not schemas."""


def check_schema(schema: JsonSchema, param: str, *, strict: bool) -> None:
    """Raises InvalidRequest for a schema that an engine cannot enforce, or cannot compile in bounded time.

    The engine itself refuses schemas that are invalid in other ways.
    """
    if _deeper_than(schema, MAX_DEPTH):
        raise invalid(param, f"a JSON schema may not nest deeper than {MAX_DEPTH} levels")
    check_size(msgspec.json.encode(schema), param)
    parts = [part for _, part in parts_of(schema)]
    if len(parts) > MAX_PARTS:
        raise invalid(param, f"a JSON schema may not have more than {MAX_PARTS} parts")
    for part in parts:
        for pattern in patterns_of(part):
            check_pattern(pattern, param)
        if strict and (ignored := _unenforced(part)):
            raise invalid(param, f"{', '.join(ignored)} cannot be enforced, as strict requires")
        reference = part.get("$ref")
        if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
            raise invalid(param, f"$ref {str(reference)[:80]!r} refers to another document")
    if _has_circular_reference(schema):
        raise invalid(param, "a $ref leads back to itself only")


def check_tool(function: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a function whose name or parameters no grammar can enforce."""
    name = function.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise invalid("tools", f"{str(name)[:140]!r} is not a name that can be enforced")
    if (schema := function.get("parameters")) is not None:
        if not isinstance(schema, dict):
            raise invalid("tools", f"the parameters of {name} are not a JSON schema")
        check_schema(schema, "tools", strict=function.get("strict") is True)


def check_size(encoded: bytes, param: str) -> None:
    """Raises InvalidRequest for a grammar that an engine does not compile in bounded time."""
    if len(encoded) > MAX_BYTES:
        raise invalid(param, f"the constraint has {len(encoded)} bytes; at most {MAX_BYTES} can be compiled")


def check_patterns(grammar: bytes, param: str) -> None:
    """Raises InvalidRequest if the patterns of a grammar, which is JSON, have too many states together."""
    patterns = (each for _, part in parts_of(msgspec.json.decode(grammar)) for each in patterns_of(part))
    if sum(map(_states, patterns)) > MAX_STATES:
        raise invalid(param, "together, the patterns are too complex to compile")


def _deeper_than(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            child
            for each in layer
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not layer:
            return False
    return True


def parts_of(schema: Any, path: str = "$") -> Iterator[tuple[str, JsonSchema]]:
    """The schema and every schema in it, each with its path."""
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from parts_of(each, f"{path}[{index}]")
    elif isinstance(schema, dict):
        yield path, schema
        for key, inner in schema.items():
            if key in NAMED_SCHEMAS and isinstance(inner, dict):
                for name, each in inner.items():
                    yield from parts_of(each, f"{path}.{key}.{name[:MAX_NAME]}")
            elif key not in VALUES:
                yield from parts_of(inner, f"{path}.{key[:MAX_NAME]}")


def patterns_of(part: JsonSchema) -> Iterator[str]:
    """The regular expressions of a schema itself."""
    if isinstance(pattern := part.get("pattern"), str):
        yield pattern
    if isinstance(named := part.get("patternProperties"), dict):
        yield from named


def check_pattern(pattern: str, param: str) -> None:
    """Raises InvalidRequest for a regular expression that an engine does not compile in bounded time."""
    short = pattern[:MAX_PATTERN]
    quantifiers = sum(part["quantifier"] is not None for part in PATTERN_PART.finditer(short))
    if len(pattern) > MAX_PATTERN or quantifiers > MAX_QUANTIFIERS or _states(short) > MAX_STATES:
        raise invalid(param, f"the pattern {pattern[:80]!r} is too complex to compile")


def _states(pattern: str) -> int:
    """How many characters the pattern matches in a row, once all its counts are unrolled."""
    groups, last = [0], 0
    for part in PATTERN_PART.finditer(pattern):
        if part["quantifier"]:
            added = last * (max(1, int(part["low"] or 1), int(part["high"] or 1)) - 1)
            groups[-1] += added
            last += added
        elif part["begin"]:
            groups.append(0)
            last = 0
        elif part["end"] and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            last = 0 if part["empty"] or part["or"] or part["end"] else 1
            groups[-1] += last
    return sum(groups)


def _unenforced(part: JsonSchema) -> list[str]:
    several = ["allOf"] if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1 else []
    return [*several, *sorted(UNENFORCED & part.keys())]


def _has_circular_reference(root: JsonSchema) -> bool:
    """Whether some part requires itself before its first token: the engine would find no token to permit."""
    required_first: dict[int, list[int]] = {}
    for _, part in parts_of(root):
        targets = [each for key in BRANCHES if isinstance(part.get(key), list) for each in part[key]]
        if "$ref" in part:
            targets.append(_resolved(root, part["$ref"]))
        required_first[id(part)] = [id(target) for target in targets if isinstance(target, dict)]
    try:
        TopologicalSorter(required_first).prepare()
    except CycleError:
        return True
    return False


def _resolved(root: Any, reference: Any) -> Any:
    """What a reference `#/a/b` points to, or None."""
    found = root
    for step in str(reference).lstrip("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found
