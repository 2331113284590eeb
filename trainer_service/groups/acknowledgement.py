"""Acknowledgements of groups that have ended: entries to remove from the stream, and verdicts to store.

ScreenedGroup ─ acknowledgement_of ─▶ Acknowledgement ─ joined ─▶ one transaction
"""

from collections.abc import Iterable, Mapping

import msgspec

from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import NO_TOKENS, Verdicts
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.rows.rows import exclusions


class AcknowledgedTurn(msgspec.Struct, frozen=True):
    """The verdict of one turn."""

    session_id: str
    turn_id: str
    verdict: Verdict
    trained: bytes | None = None
    """The packed `TrainedTokens`, if the turn was trained."""


class Acknowledgement(msgspec.Struct, frozen=True):
    """Entries to remove from the stream, verdicts of sessions and turns, and the steps that trained them.
    Checkpoints store the acknowledgements of trained groups that have not been sent to the stream yet."""

    entry_ids: list[str]
    sessions: dict[str, Verdict]
    turns: list[AcknowledgedTurn]
    steps: list[TrainedStep] = []

    @property
    def verdicts(self) -> Verdicts:
        by_turn = {(turn.session_id, turn.turn_id): turn.verdict for turn in self.turns}
        tokens = {
            (turn.session_id, turn.turn_id): turn.trained for turn in self.turns if turn.trained is not None
        }
        return Verdicts(self.sessions, by_turn, tokens, self.steps)

    @classmethod
    def joined(cls, parts: Iterable["Acknowledgement"]) -> "Acknowledgement":
        entry_ids: list[str] = []
        sessions: dict[str, Verdict] = {}
        turns: list[AcknowledgedTurn] = []
        steps: list[TrainedStep] = []
        for part in parts:
            entry_ids += part.entry_ids
            sessions |= part.sessions
            turns += part.turns
            steps += part.steps
        return cls(entry_ids, sessions, turns, steps)


def acknowledgement_of(
    screened: ScreenedGroup,
    step: int | None = None,
    version: int | None = None,
    records: Mapping[tuple[str, str], bytes] = NO_TOKENS,
) -> Acknowledgement:
    """The acknowledgement of a group. The verdict of a member says that `step` trained it and made `version`,
    or why it is not trained. `records` has the packed `TrainedTokens` of turns, by session id and turn id; of
    other trained turns, the number of tokens is stored."""
    trained = Verdict(code="trained", step=step, version=version)
    untrained = {member.session_id: verdict for member, verdict in screened.untrained}
    sessions: dict[str, Verdict] = {}
    turns: list[AcknowledgedTurn] = []
    for member in screened.group.members:
        verdict = untrained.get(member.session_id, trained)
        if verdict is None:  # the gateway has given the session its verdict
            continue
        sessions[member.session_id] = verdict
        excluded = exclusions(member.turns)
        for turn in member.turns:
            own = excluded.get(turn.turn_id) or _turn_verdict(turn, verdict)
            tokens = None
            if own.code == "trained":
                tokens = records.get((member.session_id, turn.turn_id)) or _counted(turn)
            turns.append(AcknowledgedTurn(member.session_id, turn.turn_id, own, tokens))
    entry_ids = [entry_id for member in screened.group.members for entry_id in member.entry_ids]
    return Acknowledgement(entry_ids, sessions, turns)


def _counted(turn: Turn) -> bytes:
    return TrainedTokens(len(turn.output_ids)).pack()


def _turn_verdict(turn: Turn, session: Verdict) -> Verdict:
    """The session's verdict, unless the session is trained and the turn has no output to train."""
    if session.code == "trained" and not turn.output_ids:
        return Verdict(code="invalid", detail="the turn has no output")
    return session
