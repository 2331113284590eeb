"""Rows for verl and TRL, one for each branch of a session, with the names of verl 0.9.1 and TRL 1.16.0."""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from gateway.rest.exports.pending_rows import PendingRow, RowOrigin, origin_of
from gateway.rest.exports.samples import Sample, SampleTurn, sample_of
from gateway.rest.exports.selection import TrainedSession
from rollout_queue.contract.head import TrainedBranch
from rollout_queue.contract.records import Status, VerdictCode
from rollout_queue.contract.rows import row_to_json
from rollout_queue.contract.tokens import Logprobs, TokenIds


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which of its session's rows a row is."""

    row: int
    """From 0."""
    rows: int


class TrlRow(RowOrigin, frozen=True, kw_only=True):
    """What TRL's `rollout_func` returns for one completion. A reward function gets the other fields."""

    row: int
    rows: int
    prompt_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Logprobs
    env_mask: TokenIds
    versions: TokenIds
    turns: tuple[SampleTurn, ...]


class VerlMetrics(msgspec.Struct, frozen=True):
    """The metrics of an agent loop that Weir knows."""

    generate_sequences: float
    """Seconds."""


class VerlExtra(msgspec.Struct, frozen=True, kw_only=True):
    """What verl puts into the non-tensor part of a batch."""

    uid: str
    """The group. verl compares the rewards of rows with the same `uid`."""
    min_global_steps: int
    max_global_steps: int
    """The oldest and the newest policy version of the trained tokens."""
    session_id: str
    group_size: int | None
    task_id: str | None
    status: Status
    verdict: VerdictCode
    row: int
    rows: int
    response_versions: TokenIds
    turns: tuple[SampleTurn, ...]


class VerlRow(msgspec.Struct, frozen=True, kw_only=True):
    """verl's `AgentLoopOutput`."""

    cursor: str
    created_at: float
    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: TokenIds
    response_logprobs: Logprobs
    reward_score: float
    num_turns: int
    """verl counts messages: for each call, what the agent added and the answer."""
    metrics: VerlMetrics
    extra_fields: VerlExtra


Shape = Callable[[RowOrigin, Place, Sample], msgspec.Struct]


def verl_rows(session: TrainedSession) -> Iterator[PendingRow]:
    return _by_branch(session, _verl)


def trl_rows(session: TrainedSession) -> Iterator[PendingRow]:
    return _by_branch(session, _trl)


def _by_branch(session: TrainedSession, shape: Shape) -> Iterator[PendingRow]:
    def pending(number: int, branch: TrainedBranch) -> PendingRow:
        origin = origin_of(session, branch.turns[-1].turn_id)
        place = Place(row=number, rows=len(session.branches))

        def pieces() -> Iterable[bytes]:
            return row_to_json(shape(origin, place, sample_of(session.head, branch))), b"\n"

        return PendingRow(origin.cursor, origin.created_at, pieces)

    return (pending(number, branch) for number, branch in enumerate(session.branches))


def _trl(origin: RowOrigin, place: Place, sample: Sample) -> TrlRow:
    return TrlRow(
        **msgspec.structs.asdict(origin),
        **msgspec.structs.asdict(place),
        prompt_ids=sample.prompt_P,
        completion_ids=sample.response_R,
        logprobs=sample.logprobs_R,
        env_mask=sample.mask_R,
        versions=sample.versions_R,
        turns=sample.turns,
    )


def _verl(origin: RowOrigin, place: Place, sample: Sample) -> VerlRow:
    oldest, newest = sample.versions
    return VerlRow(
        cursor=origin.cursor,
        created_at=origin.created_at,
        prompt_ids=sample.prompt_P,
        response_ids=sample.response_R,
        response_mask=sample.mask_R,
        response_logprobs=sample.logprobs_R,
        reward_score=origin.reward,
        num_turns=2 * len(sample.turns),
        metrics=VerlMetrics(sample.seconds),
        extra_fields=VerlExtra(
            uid=origin.group_id,
            min_global_steps=oldest,
            max_global_steps=newest,
            session_id=origin.session_id,
            group_size=origin.group_size,
            task_id=origin.task_id,
            status=origin.status,
            verdict=origin.verdict,
            **msgspec.structs.asdict(place),
            response_versions=sample.versions_R,
            turns=sample.turns,
        ),
    )
