"""Extends the default renderer of the library `renderers`, for models whose family the library does not have.

messages ──the model's own template──▶ text ──tokenizer──▶ prompt ids
before, before + new ──the same──▶ two texts; if one begins with the other ──▶ the ids of the new messages
"""

import json
from collections.abc import Sequence
from contextlib import suppress

from renderers import DefaultRendererConfig, ParsedResponse
from renderers.default import DefaultRenderer

from gateway.errors import InvalidRequest
from gateway.language.chat_messages import Message, Tool
from gateway.language.own.template import TemplateTokenizer

OPEN_THOUGHT = "<think>"


class TemplateRenderer(DefaultRenderer):  # type: ignore[misc]  # the library has no types
    """The default renderer; it stops where the template ends an answer, and bridges where that is safe."""

    def __init__(
        self, tokenizer: TemplateTokenizer, config: DefaultRendererConfig, stop_ids: frozenset[int]
    ) -> None:
        # `ChatRenderer` keeps thoughts: the library does not know where this template drops them.
        super().__init__(tokenizer, config.model_copy(update={"thinking_retention": None}))
        self.tokenizer = tokenizer
        self._stop_ids = stop_ids
        texts = {stop_id: tokenizer.backend.id_to_token(stop_id) for stop_id in stop_ids}
        self._stops = {text: stop_id for stop_id, text in texts.items() if text}

    def get_stop_token_ids(self) -> list[int]:
        return sorted(self._stop_ids)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] | None, ask: bool = False) -> str:
        """The text of a conversation; with `ask`, up to where the next answer begins.

        Raises TemplateRefusal if the template does not render it.
        """
        options = {**(self.config.model_extra or {}), "add_generation_prompt": ask}
        if tools:
            options["tools"] = list(tools)
        return self.tokenizer.template.text([_with_objects(message) for message in messages], **options)

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
        # The library looks for an open thought only after ChatML's header.
        end = self.tokenizer.decode((prompt_ids or [])[-4:]).rstrip()
        opened = self.tokenizer.encode(OPEN_THOUGHT) if end.endswith(OPEN_THOUGHT) else None
        return super().parse_response(token_ids, tools=tools, prompt_ids=opened)

    def added(
        self,
        before: Sequence[Message],
        last_id: int | None,
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
    ) -> list[int] | None:
        """The ids that `new` add after a sampled answer, the last of `before`, whose last id is `last_id`.

        None if the template writes `before` differently once `new` follow, or does not end an answer with a
        stop token. Raises TemplateRefusal if it does not render the messages.
        """
        ended, asked = self.text(before, tools), self.text([*before, *new], tools, ask=True)
        at, stop = max(((ended.rfind(stop), stop) for stop in self._stops), default=(-1, ""))
        if at < 0 or ended[at + len(stop) :].strip() or not asked.startswith(ended[: at + len(stop)]):
            return None
        # The stop token is encoded, too, because some tokenizers add a space where a text begins.
        ids = self.tokenizer.encode(asked[at:])
        if not ids or ids[0] != self._stops[stop]:
            return None
        if last_id in self._stop_ids:
            return ids[1:] if ids[0] == last_id else None
        return ids


def refuse_tools(messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
    """Raise InvalidRequest for a conversation with tools, if the template writes none."""
    if tools:
        raise InvalidRequest("tools: the model's chat template does not write tools", param="tools")
    for index, message in enumerate(messages):
        if message.get("tool_calls") or message.get("role") in ("tool", "function"):
            text = f"messages[{index}]: the model's chat template does not write tool calls and results"
            raise InvalidRequest(text, param=f"messages[{index}]")


def _with_objects(message: Message) -> Message:
    """The message with the arguments of its calls as objects, which templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}
