"""OpenAI's templates: text with variables such as `{{ item.answer }}` and `{{ sample.output_tools[0].id }}`.

text ── parse_template ──▶ Template ── render(variables) ──▶ text

The namespaces are `item` and `sample`. A value that is no string is written as JSON. What a variable brings
is not read as a template again.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reward_service.graders.grade import MalformedGrader, SampleNotJson, TextTooLong, UnknownVariable

MAX_TEMPLATE_CHARS = 2**18
MAX_RENDERED_CHARS = 2**20
"""The longest text that a template may become."""
MAX_VARIABLE_CHARS = 500

_STEP = r"""\.([^\W\d][\w-]*)|\[(\d{1,6})\]|\["([^"\[\]]*)"\]|\['([^'\[\]]*)'\]"""
_VARIABLE = re.compile(rf"(item|sample)((?:{_STEP})+)")
_STEPS = re.compile(_STEP)

Variables = Mapping[str, Any]
"""The values of the namespaces `item` and `sample`, as JSON has them."""


@dataclass(frozen=True)
class TemplateVariable:
    """One variable: where its value is found, step by step, and how the template writes it."""

    namespace: str
    steps: tuple[str | int, ...]
    written: str


@dataclass(frozen=True)
class Template:
    """A parsed template."""

    parts: tuple[str | TemplateVariable, ...]

    def render(self, variables: Variables, most_chars: int = MAX_RENDERED_CHARS) -> str:
        """The text with the values in place of the variables. Raises UnknownVariable, SampleNotJson,
        TextTooLong."""
        written = list[str]()
        chars = 0
        for part in self.parts:
            written.append(part if isinstance(part, str) else _text_of(_value_of(part, variables)))
            chars += len(written[-1])
            if chars > most_chars:
                raise TextTooLong(f"a template becomes longer than {most_chars} characters")
        return "".join(written)


def parse_template(text: str) -> Template:
    """Raises MalformedGrader for a variable that is not written as OpenAI documents."""
    if len(text) > MAX_TEMPLATE_CHARS:
        raise MalformedGrader(f"a template is longer than {MAX_TEMPLATE_CHARS} characters")
    return Template(tuple(_parts(text)))


def _parts(text: str) -> Iterator[str | TemplateVariable]:
    position = 0
    while (start := text.find("{{", position)) >= 0 and (end := text.find("}}", start)) >= 0:
        if start > position:
            yield text[position:start]
        yield _variable(text[start + 2 : end].strip())
        position = end + 2
    if position < len(text):
        yield text[position:]


def _variable(written: str) -> TemplateVariable:
    found = _VARIABLE.fullmatch(written) if len(written) <= MAX_VARIABLE_CHARS else None
    if found is None:
        raise MalformedGrader(
            f"{{{{{written[:MAX_VARIABLE_CHARS]}}}}} is no variable: write {{{{item.name}}}} or "
            "{{sample.name}}, with further steps such as .name, [0] or ['name']"
        )
    steps = tuple(
        int(match[2]) if match[2] else next(name for name in match.group(1, 3, 4) if name is not None)
        for match in _STEPS.finditer(found[2])
    )
    return TemplateVariable(found[1], steps, written)


def _value_of(variable: TemplateVariable, variables: Variables) -> Any:
    value = variables[variable.namespace]
    if variable.namespace == "sample" and variable.steps[0] == "output_json" and "output_json" not in value:
        raise SampleNotJson(f"{variable.written}: the model's output is not JSON")
    for step in variable.steps:
        value = _next(value, step)
        if value is None:
            raise UnknownVariable(f"{variable.written} has no value")
    return value


def _next(value: Any, step: str | int) -> Any:
    """What is one step below a value; None if there is nothing."""
    if isinstance(value, list) and isinstance(step, int):
        return value[step] if step < len(value) else None
    return value.get(step) if isinstance(value, dict) else None


def _text_of(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise TextTooLong("a value is nested too deeply") from error
