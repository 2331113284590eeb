"""Whether Redis still has what it stored last, after it was away: a power cut takes the end of its file.

append ─▶ remembered, the last ones ─▶ Redis was away ─▶ are they there? ─▶ weir:losses names the others
"""

from collections import deque
from collections.abc import Callable, Sequence

from redis.asyncio import Redis

from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.client.losses import note_loss_async
from rollout_queue.redis.heads.listing import tombstones_of

REMEMBERED = 1000
"""How many records: those of the last seconds. More than Redis loses by `appendfsync everysec`."""
NAMED = 3
"""How many sessions the sentence names."""

Record = tuple[str, str]
"""A session, and the field of its hash that holds the record."""


class LastAppended:
    """The last records that one process has appended, and that Redis has confirmed."""

    def __init__(self, redis: Redis, on_connect: Callable[[], None]) -> None:
        """`on_connect` is called at each new connection, for Redis may hold less than cached heads say."""
        self._redis, self._on_connect = redis, on_connect
        self._last: deque[Record] = deque(maxlen=REMEMBERED)
        self._connections = 0
        self._checked = 1

    def connected(self) -> None:
        """Note a new connection: Redis may have been started anew since the one before."""
        self._connections += 1
        self._on_connect()

    def note(self, session_id: str, field: str) -> None:
        self._last.append((session_id, field))

    async def check(self) -> None:
        """After a new connection, look once for the records. Raises StorageUnavailable."""
        connections = self._connections
        if connections <= self._checked:
            return
        gone = await self._gone(list(self._last))
        self._checked = connections
        if gone:
            self._last = deque((each for each in self._last if each not in gone), maxlen=REMEMBERED)
            sessions = sorted({session_id for session_id, _ in gone})
            more = "" if len(sessions) <= NAMED else f" and {len(sessions) - NAMED} more"
            said = (
                f"Redis came back without its last writes: {keys.STREAM} and the heads lack {len(gone)} "
                "records that clients were told are stored, of session "
                f"{', '.join(sessions[:NAMED])}{more}; `weir audit --answers` names them (appendfsync always "
                "would have kept them)"
            )
            await note_loss_async(self._redis, keys.session(""), said)

    async def _gone(self, records: Sequence[Record]) -> set[Record]:
        """Those that are not there; not those of sessions that were deleted or forgotten."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for session_id, field in records:
                pipeline.hexists(keys.session(session_id), field)
                pipeline.zscore(keys.FORGOTTEN_IDS, f"s:{session_id}")
            found = await stored(pipeline.execute())
        pairs = zip(records, found[::2], found[1::2], strict=True)
        gone = {record for record, there, forgotten in pairs if not there and forgotten is None}
        deleted = await tombstones_of(self._redis, {session_id for session_id, _ in gone})
        return {record for record in gone if record[0] not in deleted}
