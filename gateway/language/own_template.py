"""Reads the chat template that lies beside a model's tokenizer, and renders conversations with it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import thread_time
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from gateway.language.families import FAMILIES
from gateway.language.template_sandbox import BOUNDS, RENDER_S, Bounds, TemplateSandbox
from gateway.language.tokenizer import BareTokenizer
from gateway.language.tokenizer_files import named_tokens, object_in, tokenizer_settings

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
MAX_TEMPLATE_BYTES = 2**20
CHOSEN: Final = (DEFAULT, TOOL_USE)
"""Templates that a call may get. Others, such as `rag`, are chosen by name only, which no call can do."""
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
    """A model's chat templates by name. As in transformers, `tool_use` renders the calls that have tools."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """Raises TemplateRefusal if a template is not valid, or if none is the default."""
        self.sources = {name: sources[name] for name in CHOSEN if name in sources}
        self._tokens = tokens
        if DEFAULT not in sources:
            raise TemplateRefusal(f"none of {', '.join(sorted(sources))} is named {DEFAULT}")
        try:
            self._templates = {name: TemplateSandbox().guarded(text) for name, text in self.sources.items()}
        except FAULTS as error:
            raise TemplateRefusal(_words(error)) from error

    def text(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **options: Any,
    ) -> str:
        """The text of a conversation. Without tools or documents, the template sees none, not an empty list.

        Raises TemplateRefusal if the template refuses it or breaks a bound.
        """
        template = self._templates.get(TOOL_USE if tools else DEFAULT, self._templates[DEFAULT])
        given = {"tools": list(tools) if tools else None, "documents": documents, **options}
        written = len(json.dumps((messages, given), default=str))
        room = TEMPLATE_CHARS + 2 * written
        bounds = Bounds(thread_time() + RENDER_S, PASSES * room)
        former, parts = BOUNDS.set(bounds), []
        try:
            for part in template.generate(messages=list(messages), **{**self._tokens, **given}):
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


def own_template(model_path: Path) -> OwnTemplate | None:
    """The model's templates; None if it has none. Raises SystemExit if they cannot be read."""
    sources = _sources(model_path)
    if not sources:
        return None
    if max(map(len, sources.values())) > MAX_TEMPLATE_BYTES:
        raise SystemExit(f"a chat template of {model_path} has more than {MAX_TEMPLATE_BYTES} characters")
    try:
        return OwnTemplate(sources, named_tokens(tokenizer_settings(model_path)))
    except TemplateRefusal as error:
        raise SystemExit(f"the chat template of {model_path} is not valid: {error}") from error


def no_template(model_path: Path) -> NoReturn:
    """Raise SystemExit: the prompts of the model cannot be written."""
    raise SystemExit(
        f"no chat renderer is known for {model_path}, and it has no chat template:"
        f" set gateway.renderer to one of {', '.join(sorted(FAMILIES))}"
    )


def _sources(model_path: Path) -> dict[str, str]:
    """The sources by name, from the files that transformers prefers, in its order.

    Beside additional templates without a default, transformers uses none; here it comes from the JSON files.
    """
    files = {DEFAULT: model_path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((model_path / "additional_chat_templates").glob("*.jinja"))}
    read = {name: _content(file, MAX_TEMPLATE_BYTES) for name, file in files.items() if file.is_file()}
    if DEFAULT not in read:
        settings = _named(tokenizer_settings(model_path).get("chat_template"))
        read = (settings or _named(object_in(model_path / "chat_template.json").get("chat_template"))) | read
    return {name: source for name, source in read.items() if source.strip()}


def _named(given: Any) -> dict[str, str]:
    """A `chat_template` of a JSON file, which is one text, or a list or an object of texts by name."""
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    named = given if isinstance(given, dict) else {DEFAULT: given}
    return {str(name): source for name, source in named.items() if isinstance(source, str)}


def _content(file: Path, limit: int) -> str:
    if file.stat().st_size > limit:
        raise SystemExit(f"{file} has more than {limit} bytes")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"{file} is not in UTF-8: {error}") from error


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:500]
