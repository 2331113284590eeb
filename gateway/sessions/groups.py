"""Finds the group that a `POST /groups` has opened before, if its client lost the answer and asks again."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.listing import ListScope
from rollout_queue.contract.records import SessionSpec
from rollout_queue.contract.stream import StreamWriter

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
