"""Names the source of a task by its id: what the tasks of one environment or data set have in common.

reasoning_gym:chain_sum:7:13 ─▶ reasoning_gym:chain_sum        value-of-c ─▶ value-of        17 ─▶ (none)
"""

import re

PART = re.compile(r"[^\W_]+")
COUNTER = re.compile(r"\d+|(?=[a-f]*\d)[0-9a-f]{4,}|[0-9a-f]{8,}", re.IGNORECASE)
"""A number, or a part of a random id."""


def source_of(task_id: str) -> str:
    """The id without its last part and without the counters before it; empty if nothing is left."""
    names = [match.span() for match in PART.finditer(task_id)][:-1]
    while names and COUNTER.fullmatch(task_id, *names[-1]):
        names.pop()
    return task_id[: names[-1][1]] if names else ""
