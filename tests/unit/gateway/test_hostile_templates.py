"""Models whose own template the gateway does not render: hostile ones, and those that do not fit."""

import json
from pathlib import Path

import pytest

from gateway.language.own import template
from gateway.language.render import ChatRenderer
from tests.support.gateway.own_templates import BASE, CHATML, LOOP, MODELS, OwnModel

DOUBLED = (
    "{%- set ns = namespace(x='ab') %}{%- for a in range(60) %}{%- set ns.x = ns.x ~ ns.x %}{%- endfor %}"
)
LIST = (
    "{%- set ns = namespace(x=['a']) %}{%- for a in range(60) %}{%- set ns.x = [ns.x, ns.x] %}{%- endfor %}"
)
HOSTILE = {
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
    monkeypatch.setattr(template, "RENDER_S", 0.25)
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
