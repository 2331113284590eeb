"""Acknowledgements of groups that have ended: entries to remove from the stream, and verdicts to store.

ScreenedGroup ─ acknowledgement_of ─▶ Acknowledgement ─ joined ─▶ one transaction
"""

from collections.abc import Iterable

import msgspec

from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.rows.turns import exclusions


class AcknowledgedTurn(msgspec.Struct, frozen=True):
    """The verdict of one turn."""

    session_id: str
    turn_id: str
    verdict: Verdict


class Acknowledgement(msgspec.Struct, frozen=True):
    """Entries to remove from the stream, and verdicts of sessions and turns. Checkpoints store the
    acknowledgements of trained groups that have not been sent to the stream yet."""

    entry_ids: list[str]
    sessions: dict[str, Verdict]
    turns: list[AcknowledgedTurn]

    @property
    def verdicts(self) -> Verdicts:
        by_turn = {(turn.session_id, turn.turn_id): turn.verdict for turn in self.turns}
        return Verdicts(self.sessions, by_turn)

    @classmethod
    def joined(cls, parts: Iterable["Acknowledgement"]) -> "Acknowledgement":
        entry_ids: list[str] = []
        sessions: dict[str, Verdict] = {}
        turns: list[AcknowledgedTurn] = []
        for part in parts:
            entry_ids += part.entry_ids
            sessions |= part.sessions
            turns += part.turns
        return cls(entry_ids, sessions, turns)


def acknowledgement_of(
    screened: ScreenedGroup, step: int | None = None, version: int | None = None
) -> Acknowledgement:
    """The acknowledgement of a group. The verdict of a member says that `step` trained it and made `version`,
    or why it is not trained."""
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
        turns += [
            AcknowledgedTurn(
                member.session_id, turn.turn_id, excluded.get(turn.turn_id) or _turn_verdict(turn, verdict)
            )
            for turn in member.turns
        ]
    entry_ids = [entry_id for member in screened.group.members for entry_id in member.entry_ids]
    return Acknowledgement(entry_ids, sessions, turns)


def _turn_verdict(turn: Turn, session: Verdict) -> Verdict:
    """The session's verdict, unless the session is trained and the turn has no output to train."""
    if session.code == "trained" and not turn.output_ids:
        return Verdict(code="invalid", detail="the turn has no output")
    return session
