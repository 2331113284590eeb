"""Sums over the turns of a session, which a list of sessions shows without reading any tokens."""

import msgspec

from rollout_queue.contract.errors import InvalidRecord

NONE = "-"


class TurnSums(msgspec.Struct, frozen=True, gc=False):
    """What is known of a session's turns without their tokens."""

    turns: int = 0
    output_len: int = 0
    """How many tokens were sampled."""
    finished_at: float | None = None
    """When the last turn ended, seconds since the epoch; None without turns."""
    first_version: int | None = None
    """The oldest version that sampled a token; None if no token was sampled."""
    last_version: int | None = None


def decode_sums(raw: bytes) -> TurnSums:
    """The sums from the field `turns` of a session's hash, which APPEND_TURN writes: five numbers.

    Raises InvalidRecord.
    """
    try:
        turns, output_len, finished_at, first, last = raw.decode().split()
        return TurnSums(int(turns), int(output_len), float(finished_at), _version(first), _version(last))
    except ValueError as error:
        raise InvalidRecord(f"the sums of the turns cannot be read: {raw[:100]!r}") from error


def _version(text: str) -> int | None:
    return None if text == NONE else int(text)
