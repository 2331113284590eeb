"""Which terms of a session a client may still give after a call has opened the session.

The call was sampled, or is being sampled, with the deployment's defaults. So what decides how calls are
rendered, sampled and labelled stays as it is. The rest is about the whole session, and may be given once.
"""

import msgspec

from rollout_queue.contract.records import SessionSpec

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
