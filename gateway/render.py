"""Messages to token ids and ids to messages: the only place where text becomes tokens.

messages ──render──▶ prompt ids                                      first call of a conversation
parent's ids + new messages ──bridge──▶ parent's ids + new ids       every call that continues one
output ids ──parse──▶ content, reasoning, tool calls
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from renderers import ToolCallParseStatus, config_from_name, create_renderer

from gateway.tokenizer import BareTokenizer
from rollout_queue.tokens import TokenIds

Message = dict[str, Any]
Tool = dict[str, Any]

RENDERER_OF_MODEL_TYPE = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "llama": "llama-3", "gpt_oss": "gpt-oss"}


@dataclass(frozen=True)
class ToolCall:
    """A tool call as the model made it; `arguments` is the JSON text, also when it is not valid JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
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
    """The chat template of one model. Pure: the same messages give the same ids."""

    def __init__(self, model_path: Path, family: str = "auto") -> None:
        self.config = msgspec.json.decode((model_path / "config.json").read_bytes(), type=ModelConfig)
        eos = self.config.eos_token_id
        self.tokenizer = BareTokenizer(model_path, eos[0] if isinstance(eos, list) else eos)
        self._renderer = create_renderer(self.tokenizer, config_from_name(self._family(family)))
        self.stop_ids: list[int] = self._renderer.get_stop_token_ids()

    def _family(self, family: str) -> str:
        if family != "auto":
            return family
        known = RENDERER_OF_MODEL_TYPE.get(self.config.model_type)
        if known is None:
            raise SystemExit(
                f"no chat renderer is known for model type {self.config.model_type!r}: set gateway.renderer"
            )
        return known

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> TokenIds:
        """The prompt of a conversation that begins here, up to where the assistant starts to speak."""
        ids = self._renderer.render_ids(list(messages), tools=_listed(tools), add_generation_prompt=True)
        return TokenIds(ids)

    def bridge(
        self,
        prompt_ids: TokenIds,
        output_ids: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None,
    ) -> TokenIds | None:
        """The ids that `new_messages` add after a turn, which stays as it was sampled.

        None where the template would rewrite what was before.
        """
        bridged = self._renderer.bridge_to_next_turn(
            prompt_ids.tolist(), output_ids.tolist(), list(new_messages), tools=_listed(tools)
        )
        if bridged is None:
            return None
        return suffix_after(prompt_ids + output_ids, bridged.token_ids)

    def parse(
        self, output_ids: Sequence[int], tools: Sequence[Tool] | None, turn_id: str, *, partial: bool = False
    ) -> Answer:
        """What the sampled ids say. A call that cannot be parsed stays in the content, as it was written;
        in a `partial` answer it may still become one, and is left out."""
        parsed = self._renderer.parse_response(list(output_ids), tools=_listed(tools))
        calls: list[ToolCall] = []
        broken: list[str] = []
        for call in parsed.tool_calls:
            if call.status is ToolCallParseStatus.OK and call.name:
                call_id = call.id or f"call_{turn_id}_{len(calls)}"
                calls.append(ToolCall(call_id, call.name, _arguments(call.arguments)))
            elif not partial:
                broken.append(call.raw)
        content = "\n".join(part for part in (parsed.content, *broken) if part)
        return Answer(content, parsed.reasoning_content, tuple(calls))

    def text_of(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))


def suffix_after(before: Sequence[int], whole: Sequence[int]) -> TokenIds | None:
    """What `whole` adds to `before`; None when it does not begin with it."""
    whole = TokenIds(whole)
    before = TokenIds(before)
    return TokenIds(whole[len(before) :]) if whole[: len(before)] == before else None


def _arguments(arguments: dict[str, Any] | str | None) -> str:
    if isinstance(arguments, str):
        return arguments
    return msgspec.json.encode(arguments or {}).decode()


def _listed(tools: Sequence[Tool] | None) -> list[Tool] | None:
    return list(tools) if tools else None
