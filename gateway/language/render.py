"""Messages to token ids and ids to messages: the only place where text becomes tokens.

messages ──render──▶ prompt ids                                      first call of a conversation
parent's ids + new messages ──bridge──▶ the ids that those add       every call that continues one
output ids ──parse──▶ content, reasoning, tool calls
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from renderers import ToolCallParseStatus, create_renderer

from gateway.language.chat_messages import Message, MessageNormalizer, Tool
from gateway.language.example_conversation import EXAMPLE_MESSAGES, EXAMPLE_TOOL
from gateway.language.families import Thinking, configuration, family_of
from gateway.language.tokenizer import BareTokenizer
from rollout_queue.contract.tokens import TokenIds

__all__ = ["ChatRenderer", "Message", "ParsedAnswer", "Tool", "ToolCall", "arguments_text"]

PROMPT_TAIL = 128
"""How much of a prompt's end says where an answer begins: in a thought, or in the open."""

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What the library raises over messages, or an answer, that it cannot read: ten thousand brackets, say."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call as the model made it; `arguments` is the JSON text, also when it is not valid JSON."""

    call_id: str
    name: str
    arguments: str


class ParsedAnswer(msgspec.Struct, frozen=True):
    """A sampled answer as an agent reads it."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True):
    """The few fields of a Hugging Face config.json that the gateway needs."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | list[int] | None = None


class ChatRenderer:
    """The chat template of one model. Pure: the same messages give the same ids, as long as it is `today`."""

    def __init__(self, model_path: Path, family: str = "auto", thinking: Thinking = "template") -> None:
        self.config = msgspec.json.decode((model_path / "config.json").read_bytes(), type=ModelConfig)
        eos = self.config.eos_token_id
        self.tokenizer = BareTokenizer(model_path, eos[0] if isinstance(eos, list) else eos)
        self.family = family_of(family, model_path, self.config.model_type)
        self._configuration = configuration(self.family, thinking)
        self._made_on = self.today()
        try:
            self._renderer = create_renderer(self.tokenizer, self._configuration)
        except AssertionError as error:  # so the library says that the tokenizer lacks a control token
            raise SystemExit(
                f"gateway.renderer {self.family.name!r} does not fit the model: {error}"
            ) from error
        self.stop_ids: list[int] = self._renderer.get_stop_token_ids()
        plain = MessageNormalizer(self.family, str, str).whole(EXAMPLE_MESSAGES, [EXAMPLE_TOOL])
        written = self._renderer.render_ids(plain, tools=[EXAMPLE_TOOL], add_generation_prompt=True)
        self._transcript = MessageNormalizer(
            self.family, self.tokenizer.control(written).cut, self.tokenizer.frame(self.stop_ids).cut
        )

    def today(self) -> str:
        """The day that this machine's clock says, as does a template that puts the date into its prompt."""
        return time.strftime("%Y-%m-%d")

    def forget(self) -> None:
        """Remember no text any more."""
        self.tokenizer.forget()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> TokenIds:
        """The prompt of a conversation that begins here, up to where the assistant starts to speak."""
        if (today := self.today()) != self._made_on:  # the library asks for the date when it makes a renderer
            self._renderer = create_renderer(self.tokenizer, self._configuration)
            self._made_on = today
        taken = self._transcript.whole(messages, tools)
        return TokenIds(self._renderer.render_ids(taken, tools=_listed(tools), add_generation_prompt=True))

    def bridge(
        self,
        prompt_ids: TokenIds,
        output_ids: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        before: Sequence[Message] = (),
    ) -> TokenIds | None:
        """The ids that `new_messages`, which follow those `before`, add after a turn as it was sampled.

        None where the template would rewrite what was before. Of the prompt only the end matters.
        """
        taken = self._transcript.tail(new_messages, before)
        prompt, output = prompt_ids[-PROMPT_TAIL:].tolist(), output_ids.tolist()
        try:
            bridged = self._renderer.bridge_to_next_turn(prompt, output, taken, tools=_listed(tools))
        except UNREADABLE:
            return None
        known = prompt + output
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return None
        return TokenIds(bridged.token_ids[len(known) :])

    def parse(
        self,
        output_ids: Sequence[int],
        tools: Sequence[Tool] | None,
        turn_id: str,
        *,
        partial: bool = False,
        prompt_ids: TokenIds | None = None,
    ) -> ParsedAnswer:
        """What the sampled ids say. A call that cannot be parsed stays in the content, as it was written;
        in a `partial` answer it may still become one, and is left out. Some templates open a thought in the
        prompt: an answer that was cut inside of it is known for a thought by `prompt_ids` alone."""
        prompt = None if prompt_ids is None else prompt_ids[-PROMPT_TAIL:].tolist()
        try:
            parsed = self._renderer.parse_response(list(output_ids), tools=_listed(tools), prompt_ids=prompt)
        except UNREADABLE:
            return ParsedAnswer(
                self.text_of([token_id for token_id in output_ids if token_id not in self.stop_ids])
            )
        calls: list[ToolCall] = []
        broken: list[str] = []
        for call in parsed.tool_calls:
            if call.status is ToolCallParseStatus.OK and call.name and isinstance(call.name, str):
                call_id = call.id or f"call_{turn_id}_{len(calls)}"
                calls.append(ToolCall(call_id, _encodable(call.name), arguments_text(call.arguments)))
            elif not partial:
                broken.append(call.raw)
        # Parsers differ in the outer whitespace that they leave, and a stream has dropped it already.
        content = "\n".join(part for part in (parsed.content.strip(), *broken) if part)
        reasoning = parsed.reasoning_content
        return ParsedAnswer(content, reasoning.strip() if reasoning else reasoning, tuple(calls))

    def text_of(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))


def arguments_text(arguments: dict[str, Any] | str | None) -> str:
    """As templates write them, so that a history rendered anew has the tokens that were sampled."""
    if isinstance(arguments, str):
        return _encodable(arguments)
    try:
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(arguments)
    except (ValueError, RecursionError):  # a number beyond all bounds, which JSON has no word for
        return msgspec.json.encode(arguments).decode()
    return text


def _encodable(text: str) -> str:
    """Half of a surrogate pair, which no wire carries, as its escape."""
    return text.encode(errors="backslashreplace").decode()


def _listed(tools: Sequence[Tool] | None) -> list[Tool] | None:
    return list(tools) if tools else None
