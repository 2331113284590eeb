"""A turn's images: their places are in its record; their bytes lie once, as long as a session shows them."""

from typing import Any

import pytest

from rollout_queue.contract.codec import decode, encode
from rollout_queue.contract.errors import InvalidRecord, SessionDeleted
from rollout_queue.contract.export_rows import Episode
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.contract.records import Turn, TurnImage, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.record_restore import restore
from tests.support.queue.ends import Ends
from tests.support.queue.records import outcome, reward, spec, turn

ONE, TWO = "1" * 64, "2" * 64
PNGS = {ONE: b"one \x00\xff", TWO: b"two"}


def image(sha256: str, start: int = 0, end: int = 1) -> TurnImage:
    return TurnImage(sha256, start, end, 64, 32, (1, 2, 4))


def showing(turn_id: str, session_id: str, *hashes: str) -> Turn:
    images = tuple(image(sha256, at, at + 1) for at, sha256 in enumerate(hashes))
    return turn(turn_id, session_id, images=images)


async def write(ends: Ends, session_id: str, *hashes: str, user: str | None = None) -> None:
    made = showing(f"{session_id}-t", session_id, *hashes)
    opening = spec(session_id, user=user)
    await ends.writer.append_turn(made, 1e12, "", opening, {each: PNGS[each] for each in hashes})


@pytest.mark.parametrize(
    "images",
    [(image(ONE, 0, 4),), (image(ONE, 1, 3), image(TWO, 2, 3)), (image(ONE, 2, 3), image(TWO, 0, 1))],
)
def test_images_lie_in_their_turns_context_one_after_another(images: tuple[TurnImage, ...]) -> None:
    with pytest.raises(InvalidRecord, match="does not lie"):
        turn(images=images)


@pytest.mark.parametrize(
    "fields",
    [
        (ONE[:-1], 0, 1, 64, 32, (1, 2, 4)),
        ("G" * 64, 0, 1, 64, 32, (1, 2, 4)),
        (ONE, -1, 1, 64, 32, (1, 2, 4)),
        (ONE, 1, 1, 64, 32, (1, 2, 4)),
        (ONE, 0, 1, 64, 32, (1, 0, 4)),
    ],
)
def test_a_malformed_image_cannot_be_made(
    fields: tuple[str, int, int, int, int, tuple[int, int, int]],
) -> None:
    with pytest.raises(InvalidRecord):
        TurnImage(*fields)


def test_a_turn_without_images_has_the_bytes_that_it_had_before() -> None:
    assert b"images" not in encode(turn())
    assert decode(encode(showing("t", "s", ONE, TWO))) == showing("t", "s", ONE, TWO)


def test_a_branch_has_the_images_of_all_its_turns() -> None:
    root = showing("root", "s", ONE)
    leaf = turn("leaf", "s", parent_id="root", images=(image(TWO, 2, 3),), context_ids=TokenIds([7, 8, 9]))
    head = SessionHead(spec=spec("s"), turns=(root, leaf))
    assert head.branch_images(root) == root.images
    assert head.branch_images(leaf) == (image(ONE), image(TWO, 7, 8))
    prompt, _ = head.branch_ids(leaf)
    assert prompt[7] == 9


async def test_the_bytes_are_stored_with_the_turn_and_read_at_both_ends(ends: Ends) -> None:
    await write(ends, "a", ONE, TWO)
    (record,) = ends.read()
    assert [each.sha256 for each in record.images] == [ONE, TWO]
    assert await ends.writer.images([ONE, "f" * 64]) == {ONE: PNGS[ONE]}
    assert ends.reader.image_bytes([TWO, ONE, "f" * 64]) == PNGS


async def test_the_bytes_stay_as_long_as_a_session_shows_them(ends: Ends) -> None:
    await write(ends, "a", ONE, TWO)
    await write(ends, "b", ONE)
    await ends.deleted("a")
    assert await ends.writer.images([ONE, TWO]) == {ONE: PNGS[ONE]}
    await ends.deleted("b")
    assert await ends.writer.images([ONE, TWO]) == {}
    with pytest.raises(SessionDeleted):
        await write(ends, "a", ONE)
    assert await ends.writer.images([ONE]) == {}, "a turn that is refused stores none"
    assert ends.redis.keys("weir:image*") == []


async def test_the_bytes_go_with_the_last_session_that_is_forgotten(stream: Ends) -> None:
    for session_id in ("a", "b"):
        await write(stream, session_id, ONE)
        await stream.writer.append_outcome(outcome(session_id), reward("finish", session_id), None)
    entries = stream.reader.read(100, 0.01)
    for session_id, left in (("a", {ONE: PNGS[ONE]}), ("b", {})):
        own = [each.entry_id for each in entries if each.record.session_id == session_id]
        trained = Verdict(code="trained", step=1, version=1)
        stream.reader.acknowledge(
            own, Verdicts({session_id: trained}, {(session_id, f"{session_id}-t"): trained})
        )
        await stream.forgotten()
        assert await stream.writer.images([ONE]) == left


async def test_the_bytes_go_with_a_session_whose_turns_cannot_be_read(stream: Ends) -> None:
    for session_id in ("a", "b"):
        await write(stream, session_id, ONE, *([TWO] if session_id == "a" else []))
    field, newer = "t:a-t", b"\xff"
    record: Any = stream.redis.hget(key_names.session("a"), field)
    stream.redis.hset(key_names.session("a"), field, newer + record[1:])
    await stream.deleted("a")
    assert await stream.writer.images([ONE, TWO]) == {ONE: PNGS[ONE]}
    await stream.deleted("b")
    assert stream.redis.keys("weir:image*") == []


async def test_the_bytes_stay_as_long_as_an_imported_session_shows_them(stream: Ends) -> None:
    await write(stream, "a", ONE)
    imported = Episode(spec=spec("b", group_id="g"), turns=(showing("b-t", "b", ONE, TWO),))
    assert restore(stream.redis, imported) == "restored"
    await stream.deleted("a")
    assert await stream.writer.images([ONE]) == {ONE: PNGS[ONE]}
    await stream.deleted("b")
    assert stream.redis.keys("weir:image*") == []
