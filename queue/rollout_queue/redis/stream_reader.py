"""The trainer's end of the stream, a consumer group with one fixed consumer.

Every read of entries and every write first compares the fence: the token of the process that claimed the
trainer's lease last. So a trainer that lost its lease receives no entry and changes nothing.

An acknowledgement is cut into pages. Each page is one script, for which Redis serves nobody else.

verdicts of turns ─▶ steps and verdicts of sessions ─▶ entries

Entries come last, so a trainer that ends between two pages leaves some of them, and the next one acknowledges
all again: repeating changes nothing. Verdicts of sessions come after those of their turns, because the next
trainer leaves a session with a verdict as it is.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from redis import Redis

from rollout_queue.contract.codec import decode
from rollout_queue.contract.errors import InvalidRecord, StorageUnavailable, UnknownSchema
from rollout_queue.contract.head import decode_tombstone
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.stream import Entry, GroupMembers, Verdicts
from rollout_queue.redis import consumer_scripts, key_names
from rollout_queue.redis.availability import available
from rollout_queue.redis.lease import UNFENCED, FencedScript
from rollout_queue.redis.losses import note_loss
from rollout_queue.redis.lua import Argument, T
from rollout_queue.redis.session_heads import pages_of, verdict_code
from rollout_queue.redis.settings import NO_REPLICAS, Replication
from rollout_queue.redis.stream_pages import (
    GROUP_GONE,
    NO_GROUP,
    Pages,
    RawEntry,
    append_missing,
    older_state,
    place,
)

logger = logging.getLogger(__name__)


ITEMS = 250
"""How many turns, sessions, steps and entries a page has at most: 1 to 3 ms of Redis."""
TOGETHER = 512
"""Up to so many sessions get their verdicts in one page, so that their group ends as a whole: 6 ms."""
BYTES = 2**20
"""How many bytes of verdicts and tokens a page has about, at most."""
STEPS_KEPT = 50_000
"""How many of the last steps Redis keeps, as what made each version: about 10 MB."""


class StoredVerdict(NamedTuple):
    """A verdict as a session's hash has it."""

    session_id: str
    field: str
    verdict: bytes
    version: int | str = ""
    """The version that a session has trained."""
    tokens: bytes = b""
    """What a step used of a turn's tokens."""

    @property
    def size(self) -> int:
        return len(self.verdict) + len(self.tokens)


class Page(NamedTuple):
    """What one script writes and acknowledges."""

    verdicts: Sequence[StoredVerdict] = ()
    steps: Sequence[TrainedStep] = ()
    entry_ids: Sequence[str] = ()

    def arguments(self) -> tuple[list[str], list[Argument]]:
        """Keys and arguments of ACKNOWLEDGE."""
        places: dict[str, int] = {}
        arguments: list[Argument] = [key_names.GROUP, len(self.entry_ids), len(self.steps), STEPS_KEPT]
        arguments += self.entry_ids
        for step in self.steps:
            arguments += (step.version, msgspec.json.encode(step))
        for each in self.verdicts:
            place = places.setdefault(each.session_id, len(places) + 1)
            arguments += (place, *each)
        named = [key_names.STREAM, key_names.VERDICTS, key_names.DEADLINES, key_names.SETTLED]
        named += [key_names.TRAINED, key_names.STEPS]
        return [*named, *map(key_names.session, places)], arguments


def pages(entry_ids: Sequence[str], verdicts: Verdicts) -> Iterator[Page]:
    """The pages in the order in which they are sent; one if all of it fits."""
    count = len(entry_ids) + len(verdicts.steps) + len(verdicts.sessions) + len(verdicts.turns)
    tokens = sum(map(len, verdicts.tokens.values()))
    if count <= ITEMS and tokens <= BYTES:
        yield Page([*_of_turns(verdicts), *_of_sessions(verdicts)], verdicts.steps, entry_ids)
        return
    yield from map(Page, _cut(_of_turns(verdicts), ITEMS))
    for first in range(0, len(verdicts.steps), ITEMS):
        yield Page(steps=verdicts.steps[first : first + ITEMS])
    together = TOGETHER if len(verdicts.sessions) <= TOGETHER else ITEMS
    yield from map(Page, _cut(_of_sessions(verdicts), together))
    for first in range(0, len(entry_ids), ITEMS):
        yield Page(entry_ids=entry_ids[first : first + ITEMS])


def _cut(stored: Iterable[StoredVerdict], most: int) -> Iterator[list[StoredVerdict]]:
    """At most so many at once, and about BYTES."""
    page, size = list[StoredVerdict](), 0
    for each in stored:
        if len(page) == most or (page and size + each.size > BYTES):
            yield page
            page, size = [], 0
        page.append(each)
        size += each.size
    if page:
        yield page


def _of_turns(verdicts: Verdicts) -> Iterator[StoredVerdict]:
    for (session_id, turn_id), verdict in verdicts.turns.items():
        tokens = verdicts.tokens.get((session_id, turn_id), b"")
        packed = msgspec.json.encode(verdict)
        yield StoredVerdict(session_id, f"v:{turn_id}", packed, tokens=tokens)


def _of_sessions(verdicts: Verdicts) -> Iterator[StoredVerdict]:
    for session_id, verdict in verdicts.sessions.items():
        version = verdict.version if verdict.code == "trained" else None
        packed = msgspec.json.encode(verdict)
        yield StoredVerdict(session_id, "verdict", packed, "" if version is None else version)


Renew = Callable[[], None]
PAGE = 200
"""How many entries, verdicts or groups are read at once. Redis serves nobody else meanwhile."""
NO_VERDICTS = Verdicts(sessions={}, turns={})


class StreamReader:
    """A trainer first claims the lease, which admits one trainer at a time. `redis` returns bytes
    (decode_responses off), `token` is of the claimed Lease, and `renew` renews it.

    Every method raises StorageUnavailable when Redis does not answer. Every method but `verdict_codes`,
    `group_members` and `image_bytes` raises LeaseLost, and changes nothing, when another trainer has claimed
    the lease since.
    """

    def __init__(
        self, redis: Redis, token: str, renew: Renew = lambda: None, replication: Replication = NO_REPLICAS
    ) -> None:
        self._redis, self._token, self._pages, self._renew = redis, token, Pages(redis, token), renew
        self._replication = replication
        with available():
            self._run_id = redis.info("server").get("run_id")
        self._interrupted = False
        """Whether Redis has failed or restarted since the last `reclaim`. Then `read` refuses until the next
        `reclaim`, because some delivered entries may not have arrived here, and a restarted Redis may have
        lost acknowledgements."""
        self._delivered: bytes = b"0-0"
        """The id of the last delivered entry, noted by the last read that found nothing. The wait for a new
        entry begins after this id."""
        self._position: bytes = b"0-0"
        """The id of the last entry that this process has read as a new one."""
        self._left: str | None = None
        """The last delivered entry, if it is acknowledged; it stays in the stream."""
        self._joined = False
        """Whether the consumer group is there, as far as this process knows."""
        self._make_group()

    def confirm(self) -> None:
        """Check that no other trainer has claimed the lease, before an action that cannot be undone."""
        self._run(consumer_scripts.CONFIRM)

    def reclaim(self) -> Iterator[Entry]:
        """Every entry that was delivered and not acknowledged, oldest first. The trainer calls this when it
        starts, and after Redis was unavailable."""
        cursor, self._interrupted = b"0-0", False
        self._compare(self._delivered_last())
        while raw := self._page(PAGE, cursor):
            cursor = raw[-1][0]
            # Redis 6.2 keeps deleted entries in the pending list, and they would stop the trim.
            if gone := [entry_id.decode() for entry_id, fields in raw if fields is None]:
                self._acknowledged(gone)
            yield from self._decoded(_drained(raw))

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        """Up to `count` entries that were never delivered. Waits at most `block_s` seconds for the first."""
        if self._interrupted:
            raise StorageUnavailable("Redis was unavailable: pending entries have to be reclaimed first")
        entries = self._new(count)
        if not entries and self._wait_for_entry(block_s):
            entries = self._new(count)
        return entries

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        """Write the verdicts, acknowledge the entries, and free their memory, in as many transactions as its
        size needs.

        If it ends between two of them, entries are left, and everything before is written: verdicts of turns
        first, then the steps and all verdicts of sessions, then entries. What a step used of a turn's tokens
        is stored with the turn's verdict. Up to 512 sessions get their verdicts in one transaction. A
        deleted session gets nothing. Repeating an acknowledgement changes and counts nothing.
        """
        for page in pages(entry_ids, verdicts):
            self._send(page)
            if page.entry_ids or not entry_ids:
                self._free_entries(page.entry_ids)

    def verdict_codes(self, session_ids: Collection[str]) -> Mapping[str, str]:
        """The verdict code of each session that has a verdict.

        For a deleted session it is the code that the session had, or `deleted`.
        """
        codes: dict[str, str] = {}
        for page in pages_of(session_ids, PAGE):
            with self._noticed(), self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hmget(key_names.DELETED, page)
                for session_id in page:
                    pipeline.hget(key_names.session(session_id), "verdict")
                stones, *verdicts = pipeline.execute()
            for session_id, stone, verdict in zip(page, stones, verdicts, strict=True):
                if stone is not None:
                    codes[session_id] = decode_tombstone(stone).verdict or "deleted"
                elif verdict is not None:
                    codes[session_id] = verdict_code(session_id, verdict)
        return codes

    def group_members(self, group_ids: Collection[str]) -> Mapping[str, GroupMembers]:
        """The members of each of these groups; of a group of no fixed size, perhaps none."""
        groups: dict[str, GroupMembers] = {}
        for page in pages_of(group_ids, PAGE):
            with self._noticed(), self._redis.pipeline(transaction=False) as pipeline:
                for group_id in page:
                    pipeline.hmget(key_names.group(group_id), "size", "forgotten")
                counts = zip(page, pipeline.execute(), strict=True)
            for group_id, (size, forgotten) in counts:
                members = self._members(group_id) if size else frozenset()
                groups[group_id] = GroupMembers(int(size or 0) or None, members, int(forgotten or 0))
        return groups

    def _members(self, group_id: str) -> frozenset[str]:
        with self._noticed():
            found: Any = self._redis.smembers(
                key_names.group_members(group_id)
            )  # bounded: by the group's size
        return frozenset(name.decode() for name in found)

    def image_bytes(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        """The stored images among these, by hash."""
        found: dict[str, bytes] = {}
        for sha256 in hashes:  # one by one: an image may have megabytes
            with self._noticed():
                png: Any = self._redis.get(key_names.image(sha256))
            if png is not None:
                found[sha256] = png
        return found

    def reserve(self, version: int, location: str) -> int:
        """Reserve a version number for the weights that will lie at `location`.

        No other weights are published under it. Returns the highest number that was published or reserved
        before; `version` is reserved only if it is higher.
        """
        named = (key_names.RESERVED, key_names.POLICIES)
        return self._run(consumer_scripts.RESERVE, named, (version, location), self._replication)

    def report(self, state: Mapping[str, str | int | float]) -> None:
        """Store the trainer's status for the gateways."""
        fields: list[str | int | float] = [part for field in state.items() for part in field]
        self._run(consumer_scripts.REPORT, [key_names.TRAINER], fields)

    def _new(self, count: int) -> list[Entry]:
        """Up to `count` new entries; fewer only if the stream has no more."""
        entries: list[Entry] = []
        while len(entries) < count:
            asked = min(PAGE, count - len(entries))
            raw = self._page(asked, b">")
            found = len(raw)
            entries += self._decoded(_drained(raw))
            if found < asked:
                break
        return entries

    def _wait_for_entry(self, block_s: float) -> bool:
        """Wait for a new entry, but do not take it, because a blocking read of the consumer group could not
        check the fence."""
        with self._noticed():
            # redis-py replaces a closed connection silently, so only the run id shows a restarted Redis.
            before, self._run_id = self._run_id, self._redis.info("server").get("run_id")
            self._interrupted |= before != self._run_id
            block_ms = max(1, int(block_s * 1000))
            return bool(self._redis.xread({key_names.STREAM: self._delivered}, count=1, block=block_ms))

    def _page(self, count: int, what: bytes) -> list[RawEntry]:
        if not self._joined:
            self._join_again()
        raw = self._read_page(count, what)
        if not raw:
            delivered = self._delivered_last()
            self._delivered = delivered or self._delivered
            self._compare(delivered)
        elif what == b">":
            if place(raw[0][0]) <= place(self._position):
                note_loss(self._redis, key_names.STREAM, older_state(self._position))
            self._position = raw[-1][0]
        return raw

    def _delivered_last(self) -> bytes | None:
        """The id of the last delivered entry; None if the consumer group is gone."""
        return self._run(consumer_scripts.DELIVERED_LAST, [key_names.STREAM], [key_names.GROUP])

    def _compare(self, delivered: bytes | None) -> None:
        """Notice that Redis has delivered less, as far as it knows, than this process has read."""
        if delivered and place(delivered) < place(self._position):
            note_loss(self._redis, key_names.STREAM, older_state(self._position))
            self._position = delivered

    def _read_page(self, count: int, what: bytes) -> list[RawEntry]:
        with self._noticed():
            raw = self._pages.page(count, what)
        if raw is None:
            arguments = (key_names.GROUP, key_names.CONSUMER, count, what)
            raw = self._run(consumer_scripts.READ, [key_names.STREAM], arguments)
        return raw or []

    def _make_group(self) -> None:
        """Make the consumer group unless it is there. If it was lost, first append what the stream has lost
        with it; so an interrupted attempt is repeated. A trainer that has reported had a group."""
        if self._delivered_last() is None:
            with self._noticed():
                lost = self._position != b"0-0" or self._redis.exists(key_names.TRAINER)
            if lost:
                note_loss(self._redis, key_names.STREAM, GROUP_GONE)
                self._append_again()
            self._run(consumer_scripts.JOIN, [key_names.STREAM], [key_names.GROUP])
        self._joined = True

    def _join_again(self) -> None:
        """Make the lost group again. What had been delivered is delivered once more, so that it is pending
        again; the entry that was acknowledged and has stayed in the stream is acknowledged once more."""
        self._make_group()
        delivered = b"0-0"
        while place(delivered) < place(self._position) and (raw := self._read_page(PAGE, b">")):
            delivered = raw[-1][0]
            if self._left is not None and any(entry_id == self._left.encode() for entry_id, _ in raw):
                self._acknowledged([self._left])
        self._position = delivered

    def _append_again(self) -> None:
        """Append the records that the stream has lost."""
        with self._noticed():
            lost = append_missing(
                self._redis,
                lambda session_id, fields: self._run(
                    consumer_scripts.REFILL, [key_names.STREAM, key_names.session(session_id)], fields
                ),
            )
        if lost is not None:
            note_loss(self._redis, key_names.STREAM, lost)

    def _acknowledged(self, entry_ids: Sequence[str]) -> None:
        for page in pages(entry_ids, NO_VERDICTS):
            self._send(page)

    def _send(self, page: Page) -> None:
        self._run(consumer_scripts.ACKNOWLEDGE, *page.arguments())

    def _free_entries(self, entry_ids: Sequence[str]) -> None:
        """Free the memory of acknowledged entries, and of what an earlier call has left."""
        freed, more = [*entry_ids, *([self._left] if self._left else [])], 1
        try:
            while more:
                arguments = [key_names.GROUP, *freed]
                more, *left = self._run(consumer_scripts.FREE, [key_names.STREAM], arguments)
                self._left, freed = left[0].decode() if left else None, []
        except StorageUnavailable as error:  # they are acknowledged, and go when all before them are
            logger.warning("acknowledged entries stay in the stream for now: %s", error)

    def _decoded(self, raw: Iterable[RawEntry]) -> Iterator[Entry]:
        for entry_id, fields in raw:
            if fields is None:
                continue
            try:
                yield Entry(entry_id.decode(), decode(_payload(fields)))
            except (InvalidRecord, UnknownSchema) as error:
                self._set_aside_entry(entry_id, fields, error)

    def _set_aside_entry(self, entry_id: bytes, fields: list[bytes], error: Exception) -> None:
        """Move an entry that cannot be decoded to the dead letters, with its bytes and the error."""
        logger.error("entry %s was moved to %s: %s", entry_id.decode(), key_names.DEAD_LETTERS, error)
        named = (key_names.STREAM, key_names.DEAD_LETTERS)
        letter: list[Argument] = [*fields, b"entry", entry_id, b"error", str(error)]
        self._run(consumer_scripts.SET_ASIDE, named, [key_names.GROUP, entry_id, *letter])

    def _run(
        self,
        script: FencedScript[T],
        named: Sequence[str] = (),
        arguments: Sequence[Argument] = (),
        replication: Replication = NO_REPLICAS,
    ) -> T:
        """What the script answers. Raises LeaseLost when another trainer has claimed the lease since."""
        with self._noticed():
            return script.run_as(self._token, self._redis, named, arguments, replication)

    @contextmanager
    def _noticed(self) -> Iterator[None]:
        """Raises StorageUnavailable when Redis fails in the block, and notes that it has failed."""
        try:
            with available():
                yield
        except StorageUnavailable as error:
            self._interrupted = True
            if any(each in str(error) for each in NO_GROUP):
                self._joined = False
            if str(error) == UNFENCED:
                self._renew()
            raise


def _drained(raw: list[RawEntry]) -> Iterator[RawEntry]:
    """The entries in order. Each is removed from `raw` when it is returned, which frees its memory."""
    raw.reverse()
    while raw:
        yield raw.pop()


def _payload(fields: Sequence[bytes]) -> bytes:
    """The record of an entry that Weir appended; empty for any other entry."""
    return fields[1] if fields[0] == key_names.STREAM_FIELD else b""
