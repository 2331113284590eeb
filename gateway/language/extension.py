"""Asks the library's template what new messages add after a sampled answer."""

from collections.abc import Sequence
from typing import Any

from gateway.language.chat_messages import Message, Tool

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What the library raises for messages or answers that it cannot read, such as 10 000 nested brackets."""


def extension(
    template: Any,
    prompt: list[int],
    output: list[int],
    new: Sequence[Message],
    tools: list[Tool] | None,
) -> list[int] | None:
    """The ids after the output; None if the template would change earlier ids, or cannot read `new`."""
    try:
        bridged = template.bridge_to_next_turn(prompt, output, new, tools=tools)
    except UNREADABLE:
        return None
    known = prompt + output
    if bridged is None or bridged.token_ids[: len(known)] != known:
        return None
    added: list[int] = bridged.token_ids[len(known) :]
    return added


def after_any_answer(
    template: Any, answers: Sequence[list[int]], new: Sequence[Message], tools: list[Tool] | None
) -> list[int] | None:
    """The ids that follow the first of the answers, which have no calls, that the library continues.

    It continues no answer that ends inside its thought, or with a token that ends no message.
    """
    if any(message.get("role") == "tool" for message in new):
        return None
    found = (extension(template, answer[-1:], answer, new, tools) for answer in answers)
    return next((ids for ids in found if ids is not None), None)
