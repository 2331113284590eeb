"""A teacher that another engine serves: how likely it finds each token that the policy sampled.

    rows ─ POST {url}/generate, ids in ─▶ input_token_logprobs ─▶ the same rows, judged

It scores what it is given and samples nothing. Its vocabulary must be the policy's; its log-probabilities are
those of temperature 1.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from trainer_service.rows.rows import Row


class TeacherSettings(BaseModel):
    """Where the teacher is, and how much it is asked at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """Of an SGLang server: http://host:port."""
    api_key: str | None = None
    timeout_s: float = Field(120.0, gt=0)
    concurrency: int = Field(8, ge=1)


class TeacherAway(Exception):
    """It does not answer, or not now."""


class Judgement(NamedTuple):
    """What became of the rows of a step."""

    rows: list[Row]
    """Those of sessions that it judged."""
    refused: dict[str, str]
    """The sessions that it will never judge, and why."""


class Teacher:
    """Owns its connections."""

    def __init__(self, settings: TeacherSettings, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._client = httpx.Client(
            base_url=settings.url, headers=headers, timeout=settings.timeout_s, transport=transport
        )
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="teacher")

    def judge(self, rows: Sequence[Row]) -> Judgement:
        """Raises TeacherAway."""
        told = list(self._pool.map(self._judged, rows))
        refused = {
            row.session_id: reason for row, reason in zip(rows, told, strict=True) if isinstance(reason, str)
        }
        judged = [row for row in told if isinstance(row, Row) and row.session_id not in refused]
        return Judgement(judged, refused)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _judged(self, row: Row) -> Row | str:
        """The row with what the teacher says, or why it says nothing."""
        start = int(np.flatnonzero(row.mask_L)[0]) - 1
        told = self._ask(row, start)
        if isinstance(told, str):
            return told
        teacher_L = np.zeros(len(row), np.float32)
        for place in np.flatnonzero(row.mask_L):
            match told[place - start]:
                case [int() | float() as logprob, token_id, *_] if token_id == row.ids_L[place]:
                    teacher_L[place] = logprob
                case nonsense:
                    return f"it says {nonsense} of token {row.ids_L[place]}"
        return replace(row, teacher_L=teacher_L)

    def _ask(self, row: Row, start: int) -> list[Any] | str:
        body = {
            "input_ids": row.ids_L.tolist(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        try:
            response = self._client.post("/generate", json=body)
        except httpx.HTTPError as error:
            raise TeacherAway(f"the teacher at {self._client.base_url} does not answer: {error}") from error
        if response.status_code == 400:
            return response.text[:200]
        if response.status_code != 200:
            raise TeacherAway(f"the teacher at {self._client.base_url} says {response.status_code}")
        try:
            told = response.json()["meta_info"]["input_token_logprobs"]
        except (ValueError, KeyError, TypeError) as error:
            raise TeacherAway(f"the teacher at {self._client.base_url} talks nonsense: {error}") from error
        if not isinstance(told, list) or len(told) != len(row) - start:
            many = len(told) if isinstance(told, list) else "no"
            raise TeacherAway(f"the teacher says {many} log-probabilities of {len(row) - start} tokens")
        return told
