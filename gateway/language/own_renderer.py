"""Extends the default renderer of the library `renderers`, for models whose family the library does not have.

messages ──adaptation──▶ messages ──the model's own template──▶ text ──tokenizer──▶ prompt ids
before, before + new ──the same──▶ two texts; if one begins with the other ──▶ the ids of the new messages

Writes tools into the text of a conversation, and reads calls from the text of an answer, in Hermes' form.

It is for models whose template writes no tools, and whose tokenizer has no token for the tags.

Changes conversations for own templates that would refuse them, or would not write all of them.

tools, calls, results       ──▶ text in Hermes' form, if the template writes none and a setting asks for it
system prompt               ──▶ the beginning of the first user message, if the template has no system role
neighbours of one role      ──▶ one message, if the template demands that roles alternate
a user message after a result ──▶ preceded by an empty answer, if the template demands one
texts of messages           ──▶ lists of one part, if the template reads no other content
arguments of calls          ──▶ objects, or JSON if the template writes no others

A conversation that grows is changed as before: only neighbours that no answer separates are joined.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from renderers import DefaultRendererConfig, ParsedResponse, ToolCallParseStatus
from renderers.base import ParsedToolCall
from renderers.default import DefaultRenderer

from gateway.errors import InvalidRequest, invalid
from gateway.language.chat_messages import Message, Tool
from gateway.language.own_template import TemplateTokenizer
from gateway.language.parsed_answer import within_levels

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f"{OPEN}{CLOSE} XML tags:\n"
    f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
)
"""The words are those of Qwen's and Hermes' templates, which many models have seen."""
BLOCK = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|\\Z)", re.DOTALL)


def with_tool_prompt(messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
    """The messages without tools: the system prompt describes them, and calls and results are text."""
    written: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if written and written[-1].get("results"):
                result = f"{written.pop()['content']}\n{result}"
            written.append({"role": "user", "content": result, "results": True})
        else:
            written.append(_with_calls(message))
    for message in written:
        message.pop("results", None)
    if not tools:
        return written
    prompt = "\n".join((HEAD, *(json.dumps(tool, ensure_ascii=False) for tool in tools))) + TAIL
    if written and written[0]["role"] == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{prompt}"}, *written[1:]]
    return [{"role": "system", "content": prompt}, *written]


def _with_calls(message: Message) -> Message:
    """The message with its calls as text."""
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        name, arguments = (
            json.dumps(call["function"]["name"], ensure_ascii=False),
            call["function"]["arguments"],
        )
        texts.append(f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}')
    kept = {field: value for field, value in message.items() if field != "tool_calls"}
    return kept if "tool_calls" not in message else kept | {"content": "\n".join(texts)}


def calls_in(text: str) -> tuple[str, list[ParsedToolCall]]:
    """The text of an answer without its calls, and the calls. A block that is no call stays in the text."""
    calls: list[ParsedToolCall] = []

    def taken(block: re.Match[str]) -> str:
        if not block[0].endswith(CLOSE):
            status = ToolCallParseStatus.UNCLOSED_BLOCK
            calls.append(ParsedToolCall(raw=block[0], name=None, arguments={}, status=status))
            return ""
        try:
            call = json.loads(block[1])
        except (ValueError, RecursionError):
            call = None
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", {}) if isinstance(call, dict) else {}
        if not name or not isinstance(name, str) or not within_levels(arguments):
            return block[0]
        calls.append(
            ParsedToolCall(
                raw=block[1].strip(), name=name, arguments=arguments, status=ToolCallParseStatus.OK
            )
        )
        return ""

    return BLOCK.sub(taken, text), calls


BETWEEN = "\n\n"
"""Between texts that become one message."""


@dataclass(frozen=True)
class Adaptation:
    """What one template needs; the probe finds it out."""

    tool_prompt: bool = False
    system_in_user: bool = False
    joined_roles: frozenset[str] = frozenset()
    """Roles of which the template refuses neighbours."""
    answers_results: bool = False
    """The template refuses a user message that follows a tool's result."""
    parts: bool = False
    """The template reads contents that are lists of parts, and no texts."""
    text_arguments: bool = False
    """The template writes the arguments of calls that are JSON, and no objects."""

    def adapt(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
        """The messages that the template gets."""
        adapted = with_tool_prompt(messages, tools) if self.tool_prompt else list(messages)
        if self.system_in_user:
            adapted = _system_in_user(adapted)
        if self.joined_roles:
            adapted = _joined(adapted, self.joined_roles)
        if self.answers_results:
            adapted = _with_answers(adapted)
        if self.parts:
            adapted = [_in_parts(message) for message in adapted]
        return adapted if self.text_arguments else [with_objects(message) for message in adapted]


def with_objects(message: Message) -> Message:
    """The message with the arguments of its calls as objects, which most templates expect."""
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


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _system_in_user(messages: list[Message]) -> list[Message]:
    if not messages or messages[0]["role"] != "system":
        return messages
    system = {**messages[0], "role": "user"}
    if len(messages) > 1 and messages[1]["role"] == "user":
        return [_one(system, messages[1]), *messages[2:]]
    return [system, *messages[1:]]


def _joined(messages: list[Message], roles: frozenset[str]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.get("role") == message["role"] in roles and not last.get("tool_calls"):
            joined[-1] = _one(last, message)
        else:
            joined.append(message)
    return joined


def _with_answers(messages: list[Message]) -> list[Message]:
    answered: list[Message] = []
    for message in messages:
        if message["role"] == "user" and answered and answered[-1]["role"] == "tool":
            answered.append({"role": "assistant", "content": ""})
        answered.append(message)
    return answered


def _one(first: Message, second: Message) -> Message:
    """Two neighbours as one message: their texts, and what else either has."""
    one = {**first, **second}
    for field in ("content", "reasoning_content"):
        if field in one:
            one[field] = BETWEEN.join(filter(None, (first.get(field), second.get(field))))
    return one


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
        self.call_tags = (OPEN,) if adaptation.tool_prompt and config.tool_parser is None else ()
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
        content, calls = calls_in(read.content)
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
        raise invalid("tools", f"the model's chat template does not write tools. {TOOL_PROMPT_EXISTS}")
    for index, message in enumerate(messages):
        if message.get("tool_calls") or message.get("role") in ("tool", "function"):
            text = f"messages[{index}]: the model's chat template does not write tool calls and results"
            raise InvalidRequest(f"{text}. {TOOL_PROMPT_EXISTS}", param=f"messages[{index}]")


def with_thinking(message: Message) -> Message:
    """The message with its thought by both names that templates know."""
    thought = message.get("reasoning_content")
    return {"thinking": thought, **message} if thought else message
