"""Which turns and tokens of a session a request asks for, within bounds."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.errors import InvalidRequest, ObjectNotFound
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn

MOST_TURNS_NAMED = 100
MOST_TOKEN_TEXTS = 100_000
"""Tokens whose single texts one reply has at most."""
MOST_MESSAGE_TOKENS = 200_000
"""Tokens that are read back as messages for one reply, unless it has one turn only, or the ends."""
MOST_TEXT = 20_000
"""Characters of a message's text in a reply."""


class TokenWindow(NamedTuple):
    """The tokens [start, end) of a turn, counted from the first token of its context."""

    start: int = 0
    end: int | None = None

    def context(self, turn: Turn) -> slice:
        return slice(self.start, self._end(turn))

    def output(self, turn: Turn) -> slice:
        before = len(turn.context_ids)
        return slice(max(0, self.start - before), max(0, self._end(turn) - before))

    def of(self, turn: Turn) -> tuple[int, int]:
        """The window, cut to the turn's tokens."""
        end = self._end(turn)
        return min(self.start, end), end

    def _end(self, turn: Turn) -> int:
        length = len(turn.context_ids) + len(turn.output_ids)
        return length if self.end is None else min(self.end, length)


WHOLE = TokenWindow()


class Shown(NamedTuple):
    """What a reply has of a session's turns."""

    tokens: bool = False
    text: bool = False
    token_texts: bool = False
    turn_ids: Sequence[str] = ()
    """The turns that are shown; all if empty."""
    window: TokenWindow = WHOLE
    messages: bool = False
    ends: bool = False
    """Only the first turn and the last one, without the harness's own if there are others."""
    text_limit: int = MOST_TEXT
    """How many characters of a message's text are shown."""

    def check(self) -> None:
        """Raises InvalidRequest if the parameters do not fit together."""
        if len(self.turn_ids) > MOST_TURNS_NAMED:
            raise InvalidRequest(f"at most {MOST_TURNS_NAMED} turns can be named", param="turn_id")
        if self.window != WHOLE and len(self.turn_ids) != 1:
            raise InvalidRequest("a part of the tokens is read of one turn: name it", param="turn_id")
        start, end = self.window
        if end is not None and end < start:
            raise InvalidRequest("token_end is before token_start", param="token_end")

    def turns(self, head: SessionHead) -> list[Turn]:
        """The turns that are shown, in the session's order.

        Raises ObjectNotFound for a turn that the session does not have; InvalidRequest for the texts of too
        many tokens.
        """
        for turn_id in self.turn_ids:
            if turn_id not in head.by_id:
                raise ObjectNotFound(f"the session has no turn {turn_id[:200]!r}")
        turns = [turn for turn in head.turns if not self.turn_ids or turn.turn_id in self.turn_ids]
        if self.ends:
            own = [turn for turn in turns if turn.side_call is None] or turns
            turns = own if len(own) < 2 else [own[0], own[-1]]
        if self.messages and not self.ends and len(turns) > 1:
            _check_messages(turns)
        if self.token_texts:
            windows = [self.window.of(turn) for turn in turns]
            tokens = sum(end - start for start, end in windows)
            if tokens > MOST_TOKEN_TEXTS:
                raise InvalidRequest(
                    f"{tokens} tokens are more than the {MOST_TOKEN_TEXTS} whose texts one reply has: choose "
                    "turns by turn_id, or a part of one by token_start and token_end",
                    param="token_texts",
                )
        return turns


def _check_messages(turns: Sequence[Turn]) -> None:
    tokens = sum(len(turn.context_ids) + len(turn.output_ids) for turn in turns)
    if tokens > MOST_MESSAGE_TOKENS:
        raise InvalidRequest(
            f"{tokens} tokens are more than the {MOST_MESSAGE_TOKENS} that one reply shows as messages: "
            "choose turns by turn_id",
            param="messages",
        )


WITHOUT_TOKENS = Shown()
