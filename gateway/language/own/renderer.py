"""Extends the default renderer of the library `renderers`, for models whose family the library does not have.

messages ──adaptation──▶ messages ──the model's own template──▶ text ──tokenizer──▶ prompt ids
before, before + new ──the same──▶ two texts; if one begins with the other ──▶ the ids of the new messages
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from renderers import DefaultRendererConfig, ParsedResponse
from renderers.default import DefaultRenderer

from gateway.errors import InvalidRequest
from gateway.language.chat_messages import Message, Tool
from gateway.language.own import hermes
from gateway.language.own.adaptation import Adaptation
from gateway.language.own.template import TemplateTokenizer

OPEN_THOUGHT = "<think>"
MARK = f"m{uuid4().hex}"
"""Stands for the text of an answer, to find where the template ends it."""
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z|<think>\s*\Z")
"""Some templates begin the last answer with an empty thought, and no earlier one."""
NOTHING = Adaptation()


TOOL_PROMPT_EXISTS = "With gateway.tool_prompt: hermes, the gateway writes them into the system prompt"


class TemplateRenderer(DefaultRenderer):  # type: ignore[misc]  # the library has no types
    """The default renderer; it stops where the template ends an answer, and bridges where that is safe."""

    def __init__(
        self,
        tokenizer: TemplateTokenizer,
        config: DefaultRendererConfig,
        stop_ids: frozenset[int],
        adaptation: Adaptation = NOTHING,
        reader: Any = None,
    ) -> None:
        """`reader` is the library's renderer of a family, if it is to read the answers."""
        # `ChatRenderer` keeps thoughts: the library does not know where this template drops them.
        super().__init__(tokenizer, config.model_copy(update={"thinking_retention": None}))
        self.tokenizer = tokenizer
        self.adaptation = adaptation
        self.reader = reader
        self.call_tags = (hermes.OPEN,) if adaptation.tool_prompt and config.tool_parser is None else ()
        """The tags of calls in an answer, if they are ordinary text."""
        self._stop_ids = stop_ids
        texts = {stop_id: tokenizer.backend.id_to_token(stop_id) for stop_id in stop_ids}
        self._stops = {text: stop_id for stop_id, text in texts.items() if text}

    def with_config(self, config: DefaultRendererConfig) -> "TemplateRenderer":
        """The same with other options of the template."""
        return TemplateRenderer(self.tokenizer, config, self._stop_ids, self.adaptation, self.reader)

    def get_stop_token_ids(self) -> list[int]:
        return sorted(self._stop_ids)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] | None, ask: bool = False) -> str:
        """The text of a conversation; with `ask`, up to where the next answer begins.

        Raises TemplateRefusal if the template does not render it.
        """
        adapted = [with_thinking(message) for message in self.adaptation.adapt(messages, tools)]
        given = None if self.adaptation.tool_prompt else tools
        options = {**(self.config.model_extra or {}), "add_generation_prompt": ask}
        return self.tokenizer.template.text(adapted, tools=given, **options)

    def render_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        return self.tokenizer.encode(self.text(messages, tools, add_generation_prompt))

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Tool] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        if self.reader is not None:
            read: ParsedResponse = self.reader.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
            return read
        # The library looks for an open thought only after ChatML's header.
        end = self.tokenizer.decode((prompt_ids or [])[-4:]).rstrip()
        opened = self.tokenizer.encode(OPEN_THOUGHT) if end.endswith(OPEN_THOUGHT) else None
        read = super().parse_response(token_ids, tools=tools, prompt_ids=opened)
        if not self.call_tags:
            return read
        content, calls = hermes.calls_in(read.content)
        return replace(read, content=content, tool_calls=calls)

    def added(
        self,
        before: Sequence[Message],
        last_id: int | None,
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
    ) -> list[int] | None:
        """The ids that `new` add after a sampled answer, the last of `before`, whose last id is `last_id`.

        None if the template writes the conversation up to this answer differently once `new` follow, or does
        not end the answer with a stop token. Thoughts are left out here: who calls this knows whether the
        template keeps them. Raises TemplateRefusal if it does not render the messages.
        """
        said = [without(message, "reasoning_content") for message in before]
        marked = [*said[:-1], {**said[-1], "content": MARK}]
        found = self._after(marked, MARK, new, tools) or self._after(said, "", new, tools)
        if found is None:
            return None
        # The stop token is encoded, too, because some tokenizers add a space where a text begins.
        stop, text = found
        ids = self.tokenizer.encode(text)
        if not ids or ids[0] != self._stops[stop]:
            return None
        return ids[1:] if ids[0] == last_id else ids

    def _after(
        self, before: Sequence[Message], mark: str, new: Sequence[Message], tools: Sequence[Tool] | None
    ) -> tuple[str, str] | None:
        """The stop token that ends the answer, the last of `before`, and the text from there on.

        `mark` is the answer's text. Without one, the answer has to be written as before to its end.
        """
        ended, asked = self.text(before, tools), self.text([*before, *new], tools, ask=True)
        if not mark:
            at, stop = max(((ended.rfind(stop), stop) for stop in self._stops), default=(-1, ""))
            stays = (
                at >= 0 and not ended[at + len(stop) :].strip() and asked.startswith(ended[: at + len(stop)])
            )
            return (stop, asked[at:]) if stays else None
        (head, _, end), (new_head, _, rest) = ended.partition(mark), asked.partition(mark)
        if EMPTY_THOUGHT.sub("", head) != EMPTY_THOUGHT.sub("", new_head):
            return None
        at, stop = min(((end.find(stop), stop) for stop in self._stops if stop in end), default=(-1, ""))
        stays = at >= 0 and rest.startswith(end[: at + len(stop)])
        return (stop, rest[at:]) if stays else None


def without(message: Message, field: str) -> Message:
    return {name: value for name, value in message.items() if name != field}


def refuse_tools(messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
    """Raise InvalidRequest for a conversation with tools, if the template writes none."""
    if tools:
        text = f"tools: the model's chat template does not write tools. {TOOL_PROMPT_EXISTS}"
        raise InvalidRequest(text, param="tools")
    for index, message in enumerate(messages):
        if message.get("tool_calls") or message.get("role") in ("tool", "function"):
            text = f"messages[{index}]: the model's chat template does not write tool calls and results"
            raise InvalidRequest(f"{text}. {TOOL_PROMPT_EXISTS}", param=f"messages[{index}]")


def with_thinking(message: Message) -> Message:
    """The message with its thought by both names that templates know."""
    thought = message.get("reasoning_content")
    return {"thinking": thought, **message} if thought else message
