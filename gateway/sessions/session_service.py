"""Opens and finds sessions, and checks their owners, for the REST routes and for the agents' calls."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from gateway.callers.admission import Admission
from gateway.callers.identity import Caller, Identities, names
from gateway.errors import ObjectNotFound, StateConflict, UnknownCaller
from gateway.sessions.verdicts import session_verdict, waits_for_group
from gateway.settings import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.codec import decode_spec
from rollout_queue.contract.errors import (
    Conflict,
    GroupTaken,
    InvalidRecord,
    SessionDeleted,
    SessionForgotten,
    UnknownSchema,
)
from rollout_queue.contract.head import ListScope, SessionHead
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.records import SamplingPolicy, SessionSpec, Verdict
from rollout_queue.protocol.message import ID
from rollout_queue.redis.stream_writer import StreamWriter

Load = Callable[[str], Awaitable[SessionHead | None]]
"""Reads what is stored of the session with this stored id."""
MOST_COMPARED = 1024
"""Members of a group whose rewards are read at most."""


class SessionService:
    """The sessions of this deployment. A client key may use only its own; an admin may use all."""

    def __init__(
        self,
        settings: GatewaySettings,
        writer: StreamWriter,
        admission: Admission,
        identities: Identities,
    ) -> None:
        self._model_name = settings.model_name
        self._ttl_s = settings.session_ttl_s
        self._train_side_calls = settings.train_side_calls
        self._reasoning_effort = settings.reasoning_effort
        self._writer = writer
        self._admission = admission
        self._identities = identities
        defaults = settings.sampling
        self._sampling = SamplingPolicy.of(
            defaults.mode, temperature=defaults.temperature, top_p=defaults.top_p
        )

    # Opening

    def new_spec(
        self,
        caller: Caller,
        session_id: str | None = None,
        *,
        inferred: bool = False,
        implicit: bool = False,
    ) -> SessionSpec:
        """A new session of the caller with this deployment's defaults, not stored yet.

        Without `session_id` it gets a new id. `inferred` means that a call which named no session needs it,
        and `implicit` that a call opens it, so that a client may still describe it.
        """
        return SessionSpec(
            session_id=session_id or f"s-{new_id()}",
            owner=caller.owner,
            ttl_s=self._ttl_s,
            train_side_calls=self._train_side_calls,
            sampling=self._sampling,
            reasoning_effort=self._reasoning_effort,
            created_at=clock.now(),
            inferred=inferred,
            implicit=implicit,
        )

    async def open(self, spec: SessionSpec, caller: Caller) -> tuple[SessionSpec, bool]:
        """Store a session, or find the one with the same id. The flag says whether it is new.

        If a call has opened the session, and nobody has described it yet, `spec` is its description. A call's
        own spec is no description: the call takes the session as it is.
        Raises StateConflict if the session has other terms or was forgotten, or if its group is full; also
        LimitReached and Deleted.
        """
        await self._admission.check_session([spec])
        try:
            stored, created = await self._writer.open_session(spec)
            if not created and not spec.implicit:
                stored = await self._described(stored, spec)
        except SessionDeleted:
            tombstone = await self._writer.tombstone(spec.session_id)
            if tombstone is None or caller.owns(tombstone) or not self._may_scope(spec):
                raise
            return await self.open(self._scoped(spec), caller)
        except SessionForgotten as error:
            raise StateConflict(str(error), param="session_id", code="session_finished") from error
        except GroupTaken as error:
            if not _may_have_own_group(spec):
                raise StateConflict(str(error), param="group_id") from error
            return await self.open(self._in_own_group(spec), caller)
        except Conflict as error:
            raise StateConflict(str(error), param="group_id") from error
        if not created and not caller.owns(stored) and self._may_scope(spec):
            return await self.open(self._scoped(spec), caller)
        same = spec.implicit or stored.terms() == spec.terms()
        if not created and not (caller.owns(stored) and same):
            raise StateConflict(f"session {spec.shown_id} exists with another body", param="session_id")
        return stored, created

    async def _described(self, known: SessionSpec, asked: SessionSpec) -> SessionSpec:
        """The stored session, after `asked` has described it if it may.

        Raises StateConflict for a field that cannot be changed any more, Conflict and Deleted.
        """
        if not known.implicit or known.owner != asked.owner:
            return known
        if fixed := fixed_fields(known, asked, self._model_name):
            raise StateConflict(
                f"session {asked.shown_id} was opened by a call: its {' and '.join(fixed)} can no longer be"
                " changed, because calls are sampled with the former value",
                param=fixed[0],
            )
        counts = self._admission.counts_for_training(asked)
        stored = await self._writer.describe_session(described(known, asked), clock.now(), counts=counts)
        if stored is None:  # deleted meanwhile
            raise SessionDeleted(asked.session_id)
        return stored

    def _scoped(self, spec: SessionSpec) -> SessionSpec:
        """The session under an id that belongs to its owner, because another key's session has its id."""
        scoped = self._identities.scoped(spec.session_id, spec.owner)
        return msgspec.structs.replace(spec, session_id=scoped, name=spec.session_id)

    def _may_scope(self, spec: SessionSpec) -> bool:
        return bool(spec.owner) and spec.name is None

    def _in_own_group(self, spec: SessionSpec) -> SessionSpec:
        """The session in a group whose id belongs to its owner, because another key's group has its id."""
        scoped = self._identities.scoped(str(spec.group_id), spec.owner)
        return msgspec.structs.replace(spec, group_id=scoped, group_name=spec.group_id)

    async def open_group(
        self, specs: Sequence[SessionSpec], *, repeated: bool
    ) -> tuple[Sequence[SessionHead], bool]:
        """Store the sessions of one new group, all or none; or find those that an equal request has opened,
        which may be if it is `repeated`. The flag says whether they are new.

        Raises StateConflict if the group exists with another body, LimitReached.
        """
        if repeated and (known := await opened_before(self._writer, specs)) is not None:
            return known, False
        await self._admission.check_session(specs)
        try:
            await self._writer.open_group(specs)
        except GroupTaken as error:
            if not _may_have_own_group(specs[0]):
                raise StateConflict(str(error), param="group_id") from error
            own = [self._in_own_group(spec) for spec in specs]
            return await self.open_group(own, repeated=repeated)
        except Conflict as error:
            if (known := await opened_before(self._writer, specs)) is not None:
                return known, False  # the same request has just opened it
            raise StateConflict(str(error), param="group_id") from error
        return sorted((SessionHead(spec=spec) for spec in specs), key=by_age), True

    # Finding

    async def head(self, session_id: str, caller: Caller, *, turns: bool = True) -> SessionHead:
        """The session's head: everything that is stored of it at this moment, with its turns.

        Raises ObjectNotFound for a session that does not exist or is not the caller's, Deleted,
        UnknownCaller.
        """
        head = await self.find(session_id, caller, partial(self._writer.load, turns=turns))
        if head is None:
            raise await self.missing(session_id, caller)
        self.check_usable(head, caller)
        return head

    async def find(self, name: str, caller: Caller, load: Load) -> SessionHead | None:
        """What `load` reads of the session that the caller knows by this name; None if there is none.

        Two client keys may give their sessions one name. The first session has the name as its stored id, and
        the other a scoped id. So the session with this id may be another key's: then it is not the caller's.
        """
        for session_id in self._stored_ids(name, caller):
            head = await load(session_id)
            if head is not None and caller.owns(head.spec):
                return head
        return None

    def _stored_ids(self, name: str, caller: Caller) -> Iterator[str]:
        """The ids under which the session may be stored that the caller knows by this name."""
        if not ID.fullmatch(name):
            return
        if caller.session_id is not None:
            yield caller.session_id if names(name, caller.session_id) else name
            return
        yield name
        for owner in {caller.owner: None, caller.former: None}:  # in this order, each once
            if owner:
                yield self._identities.scoped(name, owner)

    def check_usable(self, head: SessionHead, caller: Caller) -> None:
        """Raises ObjectNotFound for a session that is not the caller's, and UnknownCaller for a session key
        after the client key that opened the session was revoked."""
        if not caller.owns(head.spec):
            raise no_session(head.spec.shown_id)
        owner = head.spec.owner
        if caller.session_id is not None and owner and not self._identities.keys.known_owner(owner):
            raise UnknownCaller("the API key that opened the session is not known any more")

    async def stored_id(self, name: str, caller: Caller) -> str:
        """The stored id of the caller's session, even if this build cannot read the session's turns.

        If the owner cannot be read either, only an admin is accepted. Raises as `head`.
        """
        for session_id in self._stored_ids(name, caller):
            if (raw := await self._writer.spec_of(session_id)) is None:
                continue
            with suppress(InvalidRecord, UnknownSchema):
                if caller.owns(decode_spec(raw)):
                    return session_id
            if caller.role == "admin":
                return session_id
        raise await self.missing(name, caller)

    async def owner_of(self, caller: Caller) -> str:
        """The client key for which the caller's calls count.

        Raises ObjectNotFound for a session key whose session does not exist, Deleted, UnknownCaller.
        """
        if caller.session_id is None:
            return caller.owner
        head = await self._writer.load_for_call(caller.session_id)
        if head is None:
            raise await self.missing(caller.session_id, caller)
        self.check_usable(head, caller)
        return head.spec.owner

    async def missing(self, session_id: str, caller: Caller) -> ObjectNotFound | SessionDeleted:
        """The error for a session that is not stored; SessionDeleted only if it was the caller's."""
        for stored_id in self._stored_ids(session_id, caller):
            tombstone = await self._writer.tombstone(stored_id)
            if tombstone is not None and caller.owns(tombstone):
                return SessionDeleted(session_id)
        return no_session(session_id)

    # Verdicts

    async def verdict(self, head: SessionHead) -> Verdict:
        """The verdict of a session, or what it waits for."""
        (verdict,) = await self.verdicts([head])
        return verdict

    async def verdicts(self, heads: Sequence[SessionHead]) -> list[Verdict]:
        """The verdicts of several sessions; each of their groups is read once."""
        waiting = {head.spec.group_id for head in heads if head.spec.group_id and waits_for_group(head)}
        groups = {group_id: await self._writer.group_progress(group_id) for group_id in sorted(waiting)}
        return [session_verdict(head, groups.get(head.spec.group_id or "")) for head in heads]

    async def group_rewards(self, head: SessionHead, verdict: Verdict) -> list[float]:
        """The rewards of the session's group, if they tell why the session has no advantage; else nothing."""
        group_id = head.spec.group_id
        if verdict.code != "zero_advantage" or group_id is None:
            return []
        scope = ListScope(group_id=group_id, turns=False)
        page = await self._writer.sessions(
            scope.start, MOST_COMPARED, lambda spec: spec.group_id == group_id, scope
        )
        members = [each.found for each in page if isinstance(each.found, SessionHead)]
        return [member.reward for member in members if member.reward is not None]


def _may_have_own_group(spec: SessionSpec) -> bool:
    return bool(spec.owner) and spec.group_name is None


def no_session(session_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"no session {session_id!r}")


OF_ONE_MEMBER = ("session_id", "name")
"""The terms of a session that the gateway chooses for each member."""


async def opened_before(writer: StreamWriter, asked: Sequence[SessionSpec]) -> list[SessionHead] | None:
    """The members of the group, in the order of their opening, without turns. None unless these are just the
    ones that are asked for, of the same owner. Raises StorageUnavailable."""
    first = asked[0]
    scope = ListScope(group_id=first.group_id, turns=False)
    same = (first.owner, _terms(first))
    page = await writer.sessions(
        scope.start, len(asked) + 1, lambda spec: (spec.owner, _terms(spec)) == same, scope
    )
    members = [each.found for each in page if isinstance(each.found, SessionHead)]
    if not len(members) == len(page) == len(asked):
        return None
    return sorted(members, key=by_age)


def by_age(member: SessionHead) -> tuple[float, str]:
    """The order of a group's members in each answer."""
    return member.spec.created_at, member.spec.session_id


def _terms(spec: SessionSpec) -> Mapping[str, Any]:
    return {name: value for name, value in spec.terms().items() if name not in OF_ONE_MEMBER}


# A call was sampled, or is being sampled, with the deployment's defaults. So what decides how calls are
# rendered, sampled and labelled stays as it is. The rest is about the whole session, and may be given once.
FIXED = ("policy", "sampling", "reasoning_effort", "thinking", "lineage", "train_side_calls")
"""The fields of a body that cannot be changed once a call has opened the session."""


def fixed_fields(known: SessionSpec, asked: SessionSpec, model_name: str) -> list[str]:
    """The fields of FIXED in which the description `asked` differs from the implicit session `known`."""
    known, asked = (_with_policy(spec, model_name) for spec in (known, asked))
    return [name for name in FIXED if getattr(known, name) != getattr(asked, name)]


def described(known: SessionSpec, asked: SessionSpec) -> SessionSpec:
    """The description `asked` of the implicit session `known`, which was opened when and how it was."""
    return msgspec.structs.replace(asked, created_at=known.created_at, inferred=known.inferred)


def _with_policy(spec: SessionSpec, model_name: str) -> SessionSpec:
    return msgspec.structs.replace(spec, policy=spec.policy or model_name)
