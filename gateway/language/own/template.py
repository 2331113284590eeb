"""Reads the chat template that lies beside a model's tokenizer, and renders conversations with it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from gateway.language.families import FAMILIES
from gateway.language.own.sandbox import BOUNDS, RENDER_S, Bounds, TemplateSandbox
from gateway.language.tokenizer import BareTokenizer
from rollout_queue import clock

MAX_TEMPLATE_BYTES = 2**20
MAX_SETTINGS_BYTES = 2**26
"""The size of a tokenizer_config.json; those with thousands of added tokens have a few megabytes."""
TEMPLATE_CHARS = 2**20
"""How many characters a template may write beside twice those of the messages and tools."""
PASSES = 64
"""How many times the characters of its output a template may make on the way to it."""
FAULTS = (
    *(TemplateError, ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError, SyntaxError, MemoryError),
)
"""What a template may raise, when it is compiled or run."""
UNSAFE = (SecurityError, ArithmeticError, RecursionError, MemoryError)


class TemplateRefusal(Exception):
    """The template does not render a conversation; the message has the template's own words."""

    def __init__(self, words: str, *, unsafe: bool = False) -> None:
        super().__init__(words)
        self.unsafe = unsafe
        """It broke a bound, or reached for what the sandbox does not have."""


class OwnTemplate:
    """A model's chat template."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Raises TemplateRefusal if the template is not valid."""
        self.source = source
        self._tokens = tokens
        try:
            self._template = TemplateSandbox().guarded(source)
        except FAULTS as error:
            raise TemplateRefusal(_words(error)) from error

    def text(self, messages: Sequence[Any], **options: Any) -> str:
        """The text of a conversation.

        Raises TemplateRefusal if the template refuses it or breaks a bound.
        """
        written = len(json.dumps((messages, options), default=str))
        room = TEMPLATE_CHARS + 2 * written
        bounds = Bounds(clock.monotonic() + RENDER_S, PASSES * room)
        former, parts = BOUNDS.set(bounds), []
        try:
            for part in self._template.generate(messages=list(messages), **{**self._tokens, **options}):
                bounds.check()
                room -= len(part)
                bounds.spend(len(part) if room >= 0 else bounds.characters + 1)
                parts.append(part)
        except FAULTS as error:
            raise TemplateRefusal(_words(error), unsafe=isinstance(error, UNSAFE)) from error
        finally:
            BOUNDS.reset(former)
        return "".join(parts)


class TemplateTokenizer(BareTokenizer):
    """A tokenizer that applies the model's own template, as the library's default renderer asks for."""

    def __init__(self, model_path: Path, eos_token_id: int | None, template: OwnTemplate) -> None:
        super().__init__(model_path, eos_token_id)
        self.template = template

    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: bool = True, return_dict: bool = False, **options: Any
    ) -> list[int]:
        return self.encode(self.template.text(messages, **options))


def own_template(model_path: Path) -> OwnTemplate:
    """The model's template. Raises SystemExit if there is none, or if it cannot be read."""
    file, settings = model_path / "chat_template.jinja", _tokenizer_config(model_path)
    source = _content(file, MAX_TEMPLATE_BYTES) if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # templates by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("tool_use") or named.get("default")
    if not isinstance(source, str) or not source.strip():
        raise SystemExit(
            f"no chat renderer is known for {model_path}, and it has no chat template:"
            f" set gateway.renderer to one of {', '.join(sorted(FAMILIES))}"
        )
    if len(source) > MAX_TEMPLATE_BYTES:
        raise SystemExit(f"the chat template of {model_path} has more than {MAX_TEMPLATE_BYTES} characters")
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    try:
        return OwnTemplate(source, tokens)
    except TemplateRefusal as error:
        raise SystemExit(f"the chat template of {model_path} is not valid: {error}") from error


def _tokenizer_config(model_path: Path) -> dict[str, Any]:
    file = model_path / "tokenizer_config.json"
    try:
        read = json.loads(_content(file, MAX_SETTINGS_BYTES)) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{file} is not valid JSON: {error}") from error
    return read if isinstance(read, dict) else {}


def _content(file: Path, limit: int) -> str:
    if file.stat().st_size > limit:
        raise SystemExit(f"{file} has more than {limit} bytes")
    return file.read_text(encoding="utf-8")


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:500]
