"""One problem of a deployment: how bad it is, what is wrong, and what to do."""

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from weir.doctor.facts import DeploymentFacts

Severity = Literal["error", "warning"]
"""error: something does not work, or a promise does not hold. warning: an operator should know of it."""


class Problem(msgspec.Struct, frozen=True):
    """What one check found."""

    check: str
    """The name of the check, such as `redis_syncs_late`."""
    severity: Severity
    sentence: str
    advice: str


Found = Iterator[tuple[Severity, str, str]]
"""How bad it is, what is wrong, and what to do."""
Check = Callable[[DeploymentFacts], Found]


def problems_of(check: Check, facts: DeploymentFacts) -> list[Problem]:
    """What the check finds, under the name of its function."""
    return [Problem(check.__name__, *found) for found in check(facts)]
