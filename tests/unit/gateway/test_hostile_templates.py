"""Models whose own template the gateway does not render: hostile ones, and those that do not fit."""

import json
from pathlib import Path

import pytest

from gateway.language import own_template
from gateway.language.render import ChatRenderer
from tests.support.gateway.own_templates import BASE, CHATML, LOOP, MODELS, OwnModel

DOUBLED = (
    "{%- set ns = namespace(x='ab') %}{%- for a in range(60) %}{%- set ns.x = ns.x ~ ns.x %}{%- endfor %}"
)
LIST = (
    "{%- set ns = namespace(x=['a']) %}{%- for a in range(60) %}{%- set ns.x = [ns.x, ns.x] %}{%- endfor %}"
)
TWO_LISTS = (
    "{%- set ns = namespace(x=['a'], y=['a']) %}{%- for a in range(60) %}"
    "{%- set ns.x = [ns.x, ns.x] %}{%- set ns.y = [ns.y, ns.y] %}{%- endfor %}"
)
TWO_TUPLES = (
    "{%- set ns = namespace(x=('a',), y=('a',)) %}{%- for a in range(60) %}"
    "{%- set ns.x = (ns.x, ns.x) %}{%- set ns.y = (ns.y, ns.y) %}{%- endfor %}"
)
COMPARED = {
    "==": TWO_LISTS + "{{- ns.x == ns.y }}",
    "a chain": TWO_LISTS + "{{- 1 < 2 != (ns.x <= ns.y) }}",
    "in": TWO_LISTS + "{{- ns.x in [1, ns.y] }}",
    "not in": TWO_LISTS + "{{- ns.x not in [1, ns.y] }}",
    "in a generator": TWO_LISTS + "{{- ns.x in ([ns.y] | map('list')) }}",
    "values": TWO_LISTS + "{{- ns.x in {1: ns.y}.values() }}",
    "dictionaries": TWO_LISTS + "{{- {'a': ns.x} == {'a': ns.y} }}",
    "the test eq": TWO_LISTS + "{{- ns.x is eq(ns.y) }}",
    "the test in": TWO_LISTS + "{{- ns.x is in([ns.y]) }}",
    "a test by name": TWO_LISTS + "{{- [ns.x] | select('<', ns.y) | list }}",
    "sort": TWO_LISTS + "{{- [ns.x, ns.y] | sort }}",
    "sort of a generator": TWO_LISTS + "{{- [ns.x, ns.y] | map('list') | sort }}",
    "a sort key": TWO_LISTS + "{{- [{'k': ns.x}, {'k': ns.y}] | sort(attribute='k') | length }}",
    "many sort keys": "{{- [{'k': messages}] | sort(attribute='k,' * 999) | length }}",
    "dictsort": TWO_LISTS + "{{- {'a': ns.x, 'b': ns.y} | dictsort(by='value') | length }}",
    "max": TWO_LISTS + "{{- [ns.x, ns.y] | max | length }}",
    "min": TWO_LISTS + "{{- [ns.x, ns.y] | min | length }}",
    "unique": TWO_TUPLES + "{{- [ns.x, ns.y] | unique | list | length }}",
    "one hash of many": "{{- range(0, 2305843009213693951 * 90000, 2305843009213693951) | unique | list }}",
    "index": TWO_LISTS + "{{- [ns.x].index(ns.y) }}",
    "count": TWO_LISTS + "{{- [ns.x].count(ns.y) }}",
    "changed": TWO_LISTS + "{%- for a in [1, 2] %}{{- loop.changed(ns.x if a == 1 else ns.y) }}{%- endfor %}",
    "a hash in get": TWO_TUPLES + "{{- {}.get(ns.x) }}",
    "a hash in an index": TWO_TUPLES + "{{- {}[ns.x] }}",
    "a hash in a dictionary": TWO_TUPLES + "{{- {ns.x: 1} | length }}",
    "a hash in dict": TWO_TUPLES + "{{- dict([(ns.x, 1)]) | length }}",
    "a hash in namespace": TWO_TUPLES + "{%- set n = namespace([(ns.x, 1)]) %}",
    "a hash in a lookup": TWO_TUPLES + "{{- ns.x in {} }}",
    "items of dictionaries": TWO_LISTS + "{{- {1: ns.x}.items() == {1: ns.y}.items() }}",
    "a difference of views": TWO_TUPLES + "{{- {ns.x: 1}.keys() - {}.keys() }}",
    "the text of a namespace": LIST + "{{- ns }}",
    "the text of values": LIST + "{{- {1: ns.x}.values() }}",
    "a filter of text": LIST + "{{- ns.x | upper }}",
    "a test of text": LIST + "{{- ns.x is lower }}",
    "a remainder of text": "{{- '%9999999999d' is odd }}",
    "a divisor of text": "{{- '%9999999999d' is divisibleby(1) }}",
    "a rounded power": "{{- 5 | round(-999999999) }}{{- 1.5 | round(999999999, 'ceil') }}",
    "much to strip": "{%- set x = 'a' * 99999 %}{{- ('b' * 99999 ~ x).strip(x ~ 'b') }}",
    "much to find": "{%- set x = 'a' * 99999 %}{{- (x ~ x).rfind('b' ~ x) }}",
}
HOSTILE = COMPARED | {
    "nested loops": LOOP,
    "much output": LOOP.replace("%}{%- endfor", "%}{{- 'x' * 9999 }}{%- endfor", 1),
    "a doubled text": DOUBLED,
    "a doubled sum": DOUBLED.replace("~", "+"),
    "a list that holds itself": LIST + "{{- ns.x | tojson }}",
    "the text of such a list": LIST + "{{- ns.x }}",
    "a power": "{{- 9 ** 999999999 }}",
    "a long product": "{{- 'x' * 9999999999 }}",
    "a repeated square": DOUBLED.replace("~", "*").replace("'ab'", "9"),
    "a wide format": "{{- '{:9999999999}'.format(1) }}",
    "a wide percent": "{{- '%9999999999d' % 1 }}",
    "a wide filter": "{{- 'x' | center(9999999999) }}",
    "a wide method": "{{- 'x'.ljust(9999999999) }}",
    "bytes of a number": "{{- (1).to_bytes(9999999999, 'big') }}",
    "many replacements": "{%- set x = 'a' * 99999 %}{{- x | replace('a', x) | replace('a', x) }}",
    "many joined": "{%- set x = 'a' * 99999 %}{{- x | list | join(x) }}{{- x.join(x | list) }}",
    "recursion": "{%- macro f() %}{{- f() }}{{- f() }}{%- endmacro %}{{- f() }}",
    "a class": "{{- ''.__class__.__mro__[1].__subclasses__() }}",
    "an attribute by filter": "{{- ''|attr('__class__')|attr('__mro__') + '' }}",
    "globals of a macro": "{%- macro f() %}{%- endmacro %}{{- f.__globals__.x }}",
    "a file": "{%- include '/etc/passwd' %}",
    "no template": "{%- for",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_at_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_template, "RENDER_S", 0.25)
    model = OwnModel(HOSTILE[name] + BASE, CHATML, "<|im_end|>")
    with pytest.raises(SystemExit, match="chat template"):
        ChatRenderer(model.make(tmp_path))


def test_a_template_that_does_not_fit_its_model_type_is_not_used(tmp_path: Path) -> None:
    directory = MODELS["granite"].make(tmp_path)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "llama"}), encoding="utf-8")
    assert ChatRenderer(directory).family.name == "own-template"
    with pytest.raises(SystemExit, match="does not fit the model"):
        ChatRenderer(directory, "llama-3")


def test_a_model_without_any_template_does_not_start(tmp_path: Path) -> None:
    directory = OwnModel(BASE, CHATML, "<|im_end|>").make(tmp_path)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit, match=r"gateway\.renderer"):
        ChatRenderer(directory)
