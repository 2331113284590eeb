"""Renders messages as token ids, and parses token ids as answers. Messages become tokens only here.

messages ──render──▶ prompt ids                                      first call of a conversation
parent's ids + new messages ──bridge──▶ ids that the messages add    every call that continues a conversation
output ids ──parse──▶ content, reasoning, tool calls
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from renderers import ParsedResponse

from gateway.errors import invalid
from gateway.language.chat_messages import Message, MessageNormalizer, Tool
from gateway.language.families import Thinking, ToolPrompt, changed, config_of, end_ids, end_token, family_of
from gateway.language.families import configuration as configuration_of
from gateway.language.image_pads import expanded, images_of
from gateway.language.own_choice import Wanted, chosen
from gateway.language.own_renderer import refuse_tools
from gateway.language.own_template import TemplateRefusal
from gateway.language.parsed_answer import (
    UNREADABLE,
    AnswerReader,
    ParsedAnswer,
    SampledIds,
    after_any_answer,
    extension,
)
from gateway.language.template_probe import Stability, kept_by, read_calls
from gateway.language.thinking import Options, ThinkingChoice, options_of
from gateway.language.tokenizer import at_most, text_chars, too_long
from rollout_queue import clock
from rollout_queue.contract.packed_tokens import TokenIds

logger = logging.getLogger(__name__)

PROMPT_TAIL = 128
"""How many tokens of a prompt's end the library gets: they tell if the answer begins inside reasoning."""

COUNTED_CONTEXTS = 2
"""A prompt is encoded up to this many times the context, so that its error names its exact length."""


class ChatRenderer:
    """The chat template of one model. The same messages give the same ids, unless the date changes."""

    def __init__(
        self,
        model_path: Path,
        family: str = "auto",
        thinking: Thinking = "template",
        context_length: int | None = None,
        tool_prompt: ToolPrompt = "none",
    ) -> None:
        config = config_of(model_path, context_length)
        self.context_length = config.context_length
        """Limit on tokens of prompt and answer together."""
        ends = end_ids(model_path, config)
        named = family_of(family, model_path, config.model_type)
        wanted = Wanted(family, thinking, tool_prompt)
        self._choice = choice = chosen(model_path, named, wanted, next(iter(ends), None), frozenset(ends))
        self._made_on = self.today()
        self._options: Options = ()
        self._variants: dict[Options, ChatRenderer] = {}
        """The renderers for calls that set the template's options. Templates have few options."""
        self.check, self.family, self.vision = choice.check, choice.family, choice.vision
        self.stability, self.tokenizer, self.template = choice.stability, choice.tokenizer, choice.template
        self.config = config.with_vocabulary(self.tokenizer.vocabulary_size)
        self._configuration = choice.configuration
        if self.stability is not None:
            logger.info("%s", self.description)
        self._reader = AnswerReader(self.tokenizer)
        stop_ids, end = self.template.get_stop_token_ids(), end_token(model_path)
        own_end = [] if end is None else [self.tokenizer.backend.token_to_id(end)]
        known = [each for each in (*stop_ids, *ends, *own_end) if each is not None]
        self.stop_ids: list[int] = [*dict.fromkeys(known)]
        """The tokens that end an answer."""
        self.foreign_stops = frozenset(self.stop_ids).difference(stop_ids)
        """Those that the model's files name, and the template does not."""
        ends_row = self.tokenizer.ends_check(self.stop_ids, self.foreign_stops)
        self.model_checks = (choice.check.row, ends_row, self.tokenizer.check())
        """What was found out about the model."""
        for check in self.model_checks:
            logger.log(logging.INFO if check.outcome == "right" else logging.WARNING, "%s", check.line)
        pads = () if self.vision is None else self.vision.pads
        self.normalizer = MessageNormalizer(
            self.family,
            self.tokenizer.control(choice.written()).cut,
            self.tokenizer.frame([*self.stop_ids, *pads]).cut,
            self.tokenizer.named(pads).cut,
        )

    def thinking(self, chosen: ThinkingChoice, param: str) -> tuple["ChatRenderer", Options]:
        """The renderer that fulfils the choice of the field `param`, and the options of its template.

        Raises InvalidRequest for a choice that the model cannot fulfil.
        """
        options = options_of(self.family, self._configuration, chosen, param)
        return self.variant(options), options

    def retention(self, thinking: Thinking) -> Options:
        """The options with which prompts keep the earlier thoughts that `thinking` says."""
        if self.stability is not None:
            return changed(self._configuration, kept_by(self._configuration, thinking))
        return changed(self._configuration, configuration_of(self.family, thinking))

    def variant(self, options: Options) -> "ChatRenderer":
        """The renderer whose template has these options; this one if there are none."""
        if not options:
            return self
        if options not in self._variants:
            made = copy(self)
            made._options, made._configuration = options, self._configuration.model_copy(update=dict(options))
            made.template = made._made_template()
            made._made_on = self.today()
            self._variants[options] = made
        return self._variants[options]

    def today(self) -> str:
        """The local date, which some templates write into the prompt."""
        return time.strftime("%Y-%m-%d", time.localtime(clock.now()))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> TokenIds:
        """The prompt of a whole conversation, up to where the assistant's answer begins."""
        if (today := self.today()) != self._made_on:  # the library reads the date when it makes a renderer
            self.template = self._made_template()
            self._made_on = today
        return self._rendered(messages, tools, ask=True)

    def render_answered(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> TokenIds:
        """The ids of a conversation that ends with an answer."""
        return self._rendered(messages, tools, ask=False)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, ask: bool) -> TokenIds:
        if not self.family.tools:
            refuse_tools(messages, tools)
        try:
            with self.bounded():
                normalized = self.normalizer.conversation(messages, tools)
                ids = self.template.render_ids(normalized, tools=_listed(tools), add_generation_prompt=ask)
                return self._with_pads(ids, messages)
        except TemplateRefusal as error:
            raise invalid("messages", f"the model's chat template does not render them: {error}") from error

    def bounded(self, param: str = "messages") -> AbstractContextManager[None]:
        """A block that encodes one prompt, and raises InvalidRequest if it has far too many tokens."""
        return at_most(COUNTED_CONTEXTS * self.context_length, self.context_length, param)

    def refuse_too_long(self, messages: Sequence[Message], param: str = "messages") -> None:
        """Raise InvalidRequest for messages whose text alone cannot fit into the context.

        The length of the text tells: nothing is encoded.
        """
        limit = COUNTED_CONTEXTS * self.context_length
        if text_chars(messages) > limit * self.tokenizer.max_token_bytes:
            raise too_long(limit, self.context_length, param)

    def bridge(
        self,
        prompt_ids: TokenIds,
        output_ids: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        before: Sequence[Message] = (),
        thoughtful: Callable[[], bool] | None = None,
    ) -> TokenIds | None:
        """The ids that `new_messages` add after a sampled turn; the messages `before` precede them.

        Returns None if the template would render the earlier conversation differently, or cannot render the
        messages. Only the end of `prompt_ids` is used. `thoughtful` tells whether there are thoughts that the
        template might drop; by default, whether the turn has one.
        """
        if thoughtful is None:
            thoughtful = partial(self.thinks_in, prompt_ids, output_ids, tools)
        if self.stability is not None:
            return self._bridged(self.stability, output_ids, new_messages, tools, before, thoughtful)
        if self.vision is not None and not self.vision.pads.isdisjoint(output_ids):
            return None  # an engine would take a sampled pad for an image
        prompt, output = prompt_ids[-PROMPT_TAIL:].tolist(), output_ids.tolist()
        listed = _listed(tools)
        template, keeping = self.template, self._keeping()
        with self.bounded():
            new = self.normalizer.continuation(new_messages, before)
            # A template that drops thoughts does so at a message of a user. Without thoughts, the sampled
            # tokens stay.
            asked = any(message["role"] == "user" for message in new)
            if asked and template is not keeping and not thoughtful():
                template = keeping
            ids = extension(template, prompt, output, new, listed)
            if ids is None and not (template is keeping or asked or thoughtful()):
                template, ids = keeping, extension(keeping, prompt, output, new, listed)
            ended = template is keeping and bool(output) and output[-1] in self.stop_ids
            if ids is None and ended and not self._calls_in(prompt_ids, output_ids, tools):
                ids = after_any_answer(keeping, self._any_answers(output[-1]), new, listed)
        return None if ids is None else self._with_pads(ids, new_messages)

    def _any_answers(self, end: int) -> list[list[int]]:
        """Answers without calls: ones that the token ends, and ones without an end."""
        closings: tuple[list[int], ...] = ([], self._reader.closing)
        return [[*closing, *last] for last in ([end], self.tokenizer.encode("a")) for closing in closings]

    def thinks_in(self, prompt_ids: TokenIds, output_ids: TokenIds, tools: Sequence[Tool] | None) -> bool:
        """Whether a sampled turn has a thought."""
        return bool(self.parse(output_ids, tools, "", prompt_ids=prompt_ids).reasoning)

    def _calls_in(self, prompt_ids: TokenIds, output_ids: TokenIds, tools: Sequence[Tool] | None) -> bool:
        return bool(self.parse(output_ids, tools, "", prompt_ids=prompt_ids).tool_calls)

    def _keeping(self) -> Any:
        """The template that keeps thoughts; this one if it does, or if it has no such option."""
        if getattr(self._configuration, "thinking_retention", "all") == "all":
            return self.template
        return self.variant((*self._options, ("thinking_retention", "all"))).template

    def _with_pads(self, ids: list[int], messages: Sequence[Message]) -> TokenIds:
        """The ids that the messages have, with all pads of their images."""
        return TokenIds(ids if self.vision is None else expanded(ids, images_of(messages), self.vision))

    def _bridged(
        self,
        stability: Stability,
        output_ids: TokenIds,
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        before: Sequence[Message],
        thoughtful: Callable[[], bool],
    ) -> TokenIds | None:
        """What `bridge` returns, by the model's own template: it renders the whole conversation as text."""
        if not before or not stability.bridges(bool(tools)):
            return None
        keeps = self._configuration.thinking_retention == "all" or not self.family.thinks
        if not keeps and stability.may_drop(new) and thoughtful():
            return None
        last_id = output_ids[-1] if len(output_ids) else None
        try:
            with self.bounded():
                earlier = self.normalizer.conversation(before, tools)
                later = self.normalizer.continuation(new, before)
                added = self.template.added(earlier, last_id, later, tools)
        except (TemplateRefusal, *UNREADABLE):
            return None
        return None if added is None else TokenIds(added)

    @property
    def description(self) -> str:
        """How the gateway writes prompts and reads answers, in a sentence for operators."""
        if self.stability is None:
            return f"the chat template is that of the family {self.family.name}"
        return f"the chat template is the model's own: {self.stability}; {read_calls(self.family)}"

    def _made_template(self) -> Any:
        return self._choice.remade(self._configuration)

    def parse(
        self,
        output_ids: Sequence[int],
        tools: Sequence[Tool] | None,
        turn_id: str,
        *,
        partial: bool = False,
        prompt_ids: TokenIds | None = None,
    ) -> ParsedAnswer:
        """Parse the sampled ids.

        A tool call that cannot be parsed stays in the content as it was written. In a `partial` answer one at
        the end is left out, because later tokens may complete it. Some templates begin the reasoning in the
        prompt: if such an answer was cut off, only `prompt_ids` tells that it is reasoning.
        """
        prompt = None if prompt_ids is None else prompt_ids[-PROMPT_TAIL:].tolist()
        ids = list(output_ids[:-1] if output_ids and output_ids[-1] in self.foreign_stops else output_ids)
        said = ids[:-1] if ids and ids[-1] in self.stop_ids else ids

        def parse(ids: list[int], prompt: list[int] | None) -> ParsedResponse:
            return self.template.parse_response(ids, tools=_listed(tools), prompt_ids=prompt)

        sampled = SampledIds(said, prompt, parse)
        try:
            return self._reader.answer(parse(ids, prompt), sampled, turn_id, partial)
        except UNREADABLE:
            return self._reader.answer_in_part(sampled, turn_id)

    def text_of(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))


def _listed(tools: Sequence[Tool] | None) -> list[Tool] | None:
    return list(tools) if tools else None
