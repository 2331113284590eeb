"""Decides what other trainers get: sessions that have ended with a reward, and the turns to be trained.

A row that is built when it is written, and the facts about its session that each row repeats.

One trained branch as a prompt and a response, with a mask, logprobs and policy versions for each token.

root ─ a ─ b      prompt:    the context of root
     └ c          response:  output of root, context of b, output of b, …; mask 1 where a token is trained

Rows for verl and TRL, one for each branch of a session, with the names of verl 0.9.1 and TRL 1.16.0.

Rows with OpenEnv's training trace, one for each session, with the names of OpenEnv 0.10.0.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.export_rows import row_to_json
from rollout_queue.contract.head import SessionHead, TrainedBranch
from rollout_queue.contract.outcomes import OPENED_UNTRAINED, exclusion, total
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import (
    Finish,
    Outcome,
    Relation,
    Span,
    Status,
    Turn,
    Verdict,
    VerdictCode,
    temperature_of_logprobs,
)

HAS_IMAGES = Verdict(code="not_for_training", detail="its prompts show images, which the format cannot hold")
NOTHING_TRAINED = Verdict(code="not_for_training", detail="it has no turn that may be trained")


class TrainedSession(NamedTuple):
    """A session that trainers get."""

    head: SessionHead
    outcome: Outcome
    reward: float
    """The sum of all rewards of the session and its turns."""
    verdict: Verdict
    branches: tuple[TrainedBranch, ...]
    """At least one."""

    @property
    def group_id(self) -> str:
        """A session without a group is a group of its own."""
        return self.head.spec.group_id or self.head.spec.session_id

    @property
    def trained(self) -> frozenset[str]:
        """The ids of all turns that are trained."""
        return frozenset[str]().union(*(branch.trained for branch in self.branches))


def selected(head: SessionHead, verdict: Verdict, partial_groups: bool) -> TrainedSession | Verdict:
    """The session for trainers, or the verdict that says why they do not get it.

    `partial_groups`: also sessions whose group has members that have not ended.
    """
    outcome, reward = head.outcome, head.reward
    if outcome is None or reward is None or outcome.status in ("failed", "abandoned"):
        return verdict
    if not head.spec.train:
        return OPENED_UNTRAINED
    if verdict.code == "invalid" or (verdict.code == "group_incomplete" and not partial_groups):
        return verdict
    if any(turn.images for turn in head.turns):
        return HAS_IMAGES
    trainable = [turn.turn_id for turn in head.turns if exclusion(turn, head.orphans) is None]
    try:
        branches = tuple(head.trained_branches(trainable))
    except InvalidRecord as error:
        return Verdict(code="invalid", detail=str(error))
    return TrainedSession(head, outcome, reward, verdict, branches) if branches else NOTHING_TRAINED


class PendingRow(NamedTuple):
    """One line of JSON. It is built late: tokens that several rows share are in each of them."""

    cursor: str
    created_at: float
    """When the session was opened, seconds since the epoch."""
    pieces: Callable[[], Iterable[bytes]]
    """The line, with its newline."""


class RowOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a row, and what became of it."""

    cursor: str
    created_at: float
    session_id: str
    group_id: str
    group_size: int | None
    task_id: str | None
    status: Status
    verdict: VerdictCode
    reward: float


def origin_of(session: TrainedSession, turn_id: str) -> RowOrigin:
    """`turn_id` makes the cursor unique among the rows of the session."""
    spec = session.head.spec
    return RowOrigin(
        cursor=f"{spec.session_id}/{turn_id}",
        created_at=spec.created_at,
        session_id=spec.session_id,
        group_id=session.group_id,
        group_size=spec.group_size,
        task_id=spec.task_id,
        status=session.outcome.status,
        verdict=session.verdict.code,
        reward=session.reward,
    )


NO_VERSION = -1


class SampleTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The response tokens [start, end) are the output of this turn."""

    turn_id: str
    start: int
    end: int
    trained: bool
    """False for a turn that another row trains, or that must not be trained. Its mask is 0."""
    reward: float | None
    """The sum of the turn's own rewards; the session's reward includes it."""
    temperature: float
    """The logprobs are those of the distribution at this temperature."""
    finish_reason: str


class Sample(NamedTuple):
    """P prompt tokens and R response tokens. The last response token is trained."""

    prompt_P: TokenIds
    response_R: TokenIds
    mask_R: TokenIds
    """1 for tokens that the policy sampled and that this row trains, 0 for others."""
    logprobs_R: Logprobs
    """In nats, as the engine reported them; 0 where the mask is 0."""
    versions_R: TokenIds
    """The policy version that sampled each token; -1 where the mask is 0."""
    turns: tuple[SampleTurn, ...]
    seconds: float
    """The sum of the times that the calls took."""

    @property
    def versions(self) -> tuple[int, int]:
        """The smallest and the largest version of the trained tokens."""
        known = [version for version in self.versions_R if version != NO_VERSION]
        return min(known), max(known)


def sample_of(head: SessionHead, branch: TrainedBranch) -> Sample:
    """The tokens of a branch up to the last one that is trained."""
    last = max(number for number, turn in enumerate(branch.turns) if turn.turn_id in branch.trained)
    turns = branch.turns[: last + 1]
    response, mask, versions = TokenIds(), TokenIds(), TokenIds()
    logprobs = Logprobs()
    spans = []
    for number, turn in enumerate(turns):
        if number:  # the context of the first turn is the prompt
            between = len(turn.context_ids)
            response += turn.context_ids
            mask += zeros(between)
            versions += TokenIds([NO_VERSION] * between)
            logprobs += Logprobs([0.0] * between)
        start, length, trained = len(response), len(turn.output_ids), turn.turn_id in branch.trained
        response += turn.output_ids
        mask += TokenIds([int(trained)] * length)
        versions += versions_of(turn) if trained else TokenIds([NO_VERSION] * length)
        logprobs += turn.logprobs if trained else Logprobs([0.0] * length)
        spans.append(_span(head, turn, start, trained))
    seconds = sum(turn.finished_at - turn.started_at for turn in turns)
    return Sample(turns[0].context_ids, response, mask, logprobs, versions, tuple(spans), seconds)


def zeros(count: int) -> TokenIds:
    return TokenIds.unpack(bytes(4 * count))


def versions_of(turn: Turn) -> TokenIds:
    """The policy version of each output token."""
    versions = TokenIds()
    for span in turn.versions:
        versions += TokenIds([span.version]) * (span.end - span.start)
    return versions


def _span(head: SessionHead, turn: Turn, start: int, trained: bool) -> SampleTurn:
    return SampleTurn(
        turn_id=turn.turn_id,
        start=start,
        end=start + len(turn.output_ids),
        trained=trained,
        reward=total(head.rewards_of(turn)),
        temperature=temperature_of_logprobs(turn.sampling.used),
        finish_reason=turn.finish,
    )


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


class OpenEnvMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a call beside its tokens. Weir records no messages."""

    parent_id: str | None
    relation: Relation
    model: str
    finish_reason: Finish
    sampling_params: dict[str, Any]
    requested_sampling_params: dict[str, Any]
    versions: tuple[Span, ...]
    reward: float | None
    """The sum of the turn's own rewards; the session's reward includes it."""


class OpenEnvTurn(msgspec.Struct, frozen=True, kw_only=True):
    """OpenEnv's `TrainingTurn`: one call with its whole prompt. The mask covers prompt and completion."""

    node_id: str
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    per_token_logps: Logprobs
    loss_mask: TokenIds
    metadata: OpenEnvMetadata


def openenv_rows(session: TrainedSession) -> Iterator[PendingRow]:
    origin = origin_of(session, "")
    yield PendingRow(origin.cursor, origin.created_at, lambda: _pieces(session, origin))


def _pieces(session: TrainedSession, origin: RowOrigin) -> Iterator[bytes]:
    """The line in pieces of one call: the prompts of a session grow with the square of its length."""
    yield row_to_json(origin)[:-1] + b',"trace":{"schema_version":1,"turns":['
    comma, trained = b"", session.trained
    for turn in _turns(session):
        yield comma + row_to_json(_turn(session, turn, turn.turn_id in trained))
        comma = b","
    yield b"]}}\n"


def _turns(session: TrainedSession) -> Iterator[Turn]:
    """Each turn of the branches once, branch after branch. Readers compare a turn with the one before it."""
    turns = {turn.turn_id: turn for branch in session.branches for turn in branch.turns}
    return (turn for turn in turns.values() if turn.output_ids)


def _turn(session: TrainedSession, turn: Turn, trained: bool) -> OpenEnvTurn:
    prompt, output = session.head.branch_ids(turn)
    mask = zeros(len(prompt))
    mask += TokenIds([int(trained)] * len(output))
    return OpenEnvTurn(
        node_id=turn.turn_id,
        prompt_token_ids=prompt,
        completion_token_ids=output,
        per_token_logps=turn.logprobs,
        loss_mask=mask,
        metadata=OpenEnvMetadata(
            parent_id=turn.parent_id,
            relation=session.head.relation_of(turn),
            model=turn.policy,
            finish_reason=turn.finish,
            sampling_params=turn.sampling.used,
            requested_sampling_params=turn.sampling.asked,
            versions=turn.versions,
            reward=total(session.head.rewards_of(turn)),
        ),
    )
