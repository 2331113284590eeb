"""Turns what agents did through Weir into the data of a Tinker loop.

agents ── OpenAI, Anthropic ─▶ gateway ── GET /admin/export?format=trl ─▶ RecordedRow ── datums ─▶ types.Datum

This module needs httpx, and `tinker` where a Datum is made; it imports nothing else of Weir. So a loop can
take it into the environment of its SDK.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class RecordedRow:
    """One branch of a recorded session: P prompt tokens and R response tokens, as they were sampled."""

    session_id: str
    group_id: str
    task_id: str | None
    reward: float
    rows: int
    """How many branches the session has. Its reward is that of each."""
    prompt_P: Sequence[int]
    response_R: Sequence[int]
    mask_R: Sequence[int]
    """1 for tokens that the policy sampled and that this row trains, 0 for others."""
    logprobs_R: Sequence[float]
    """Nats, under the weights that sampled them; 0 where the mask is 0."""
    versions_R: Sequence[int]
    """The policy version that sampled each token; -1 where the mask is 0."""
    turn_ids: Sequence[str]
    cursor: str

    @property
    def ids(self) -> list[int]:
        """All tokens of the row."""
        return [*self.prompt_P, *self.response_R]


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of a loss for the N = P + R - 1 positions of a row. Position i predicts token i + 1."""

    input_N: Sequence[int]
    target_N: Sequence[int]
    logprobs_N: Sequence[float]
    advantages_N: Sequence[float]
    """0 where no token is trained."""
    mask_N: Sequence[float]


def recorded(
    gateway_url: str, admin_key: str | None, *, after: str | None = None, **query: str | float
) -> Iterator[RecordedRow]:
    """The rows of the sessions that have ended with a reward, the oldest first; with `after`, those after the
    row with this cursor. `query`: `since`, `until`, `limit`, `partial_groups` of the export.

    A gateway without keys needs no `admin_key`. Raises httpx.HTTPError.
    """
    given: dict[str, Any] = {"format": "trl"} | query | ({} if after is None else {"cursor": after})
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    url = f"{gateway_url.rstrip('/')}/admin/export"
    with httpx.stream("GET", url, params=given, headers=headers, timeout=60) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            yield _row(json.loads(line))


def group_advantages(rows: Iterable[RecordedRow]) -> dict[str, float]:
    """For each session, its reward minus the mean of its group; each session counts once."""
    rewards: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        rewards[row.group_id][row.session_id] = row.reward
    return {
        session_id: reward - sum(group.values()) / len(group)
        for group in rewards.values()
        for session_id, reward in group.items()
    }


def token_inputs(row: RecordedRow, advantage: float) -> TokenInputs:
    """The inputs of a row whose trained tokens all have this advantage."""
    ids, before = row.ids, len(row.prompt_P) - 1
    mask_N = [0.0] * before + [float(each) for each in row.mask_R]
    return TokenInputs(
        input_N=ids[:-1],
        target_N=ids[1:],
        logprobs_N=[0.0] * before + list(row.logprobs_R),
        advantages_N=[advantage * each for each in mask_N],
        mask_N=mask_N,
    )


def datum(row: RecordedRow, advantage: float) -> Any:
    """The row as a `tinker.types.Datum` for `importance_sampling`, `ppo` and their kin."""
    from tinker import types

    inputs = token_inputs(row, advantage)

    def floats(values: Sequence[float]) -> Any:
        return types.TensorData(data=list(values), dtype="float32", shape=[len(values)])

    return types.Datum(
        model_input=types.ModelInput.from_ints(list(inputs.input_N)),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=list(inputs.target_N), dtype="int64", shape=[len(inputs.target_N)]
            ),
            "logprobs": floats(inputs.logprobs_N),
            "advantages": floats(inputs.advantages_N),
        },
    )


def datums(rows: Iterable[RecordedRow]) -> list[tuple[Any, RecordedRow]]:
    """A datum for each row whose group differs in its rewards, and the row that it was made of."""
    given = list(rows)
    advantages = group_advantages(given)
    return [(datum(row, advantages[row.session_id]), row) for row in given if advantages[row.session_id]]


def _row(line: dict[str, Any]) -> RecordedRow:
    if "error" in line:  # the last line of an export that broke off
        raise httpx.StreamError(line["error"]["message"])
    return RecordedRow(
        session_id=line["session_id"],
        group_id=line["group_id"],
        task_id=line["task_id"],
        reward=line["reward"],
        rows=line["rows"],
        prompt_P=line["prompt_ids"],
        response_R=line["completion_ids"],
        mask_R=line["env_mask"],
        logprobs_R=line["logprobs"],
        versions_R=line["versions"],
        turn_ids=[turn["turn_id"] for turn in line["turns"] if turn["trained"]],
        cursor=line["cursor"],
    )
