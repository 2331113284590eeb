"""Asks a teacher on another engine for its log-probability of each token that the policy sampled.

    rows ─ POST {url}/generate, ids in ─▶ input_token_logprobs ─▶ the same rows, with lp_teacher_L
                                        └ input_top_logprobs ──▶ and with teacher_top, if K of them are asked

Each request also samples one token, which is ignored. The teacher must have the policy's vocabulary. The
log-probabilities are at temperature 1.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import numpy as np

from rollout_queue.foreign_json import read_json
from rollout_queue.http.callers import bearer
from trainer_service.rows.rows import Row, TopTokens
from trainer_service.settings import TeacherSettings


class TeacherUnavailable(Exception):
    """The teacher cannot be reached, or failed to answer. The same request may succeed later."""


ROUNDING = 1e-3
"""How far above 0 a teacher's log-probability may be: it may be computed in 16 bits."""


class TeacherScores(NamedTuple):
    """The rows of a step after the teacher has scored them."""

    rows: list[Row]
    """The rows with `lp_teacher_L`, without those of refused sessions."""
    refused: dict[str, str]
    """The sessions that the teacher will never score, by id, and why."""


class TeacherClient:
    """Sends rows to the teacher, several at once. Owns its connections and threads."""

    def __init__(
        self,
        settings: TeacherSettings,
        vocab_size: int,
        top_k: int = 0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """The teacher also tells its `top_k` most probable tokens at each place, of the `vocab_size` tokens
        of the policy."""
        self._vocab_size, self._top_k = vocab_size, top_k
        headers = bearer(settings.api_key)
        self._client = httpx.Client(
            base_url=settings.url, headers=headers, timeout=settings.timeout_s, transport=transport
        )
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="teacher")

    def score(self, rows: Sequence[Row]) -> TeacherScores:
        """Score all rows. Raises TeacherUnavailable if the teacher does not answer for one of them."""
        answers = list(self._pool.map(self._scored, rows))
        refused = {
            row.session_id: reason
            for row, reason in zip(rows, answers, strict=True)
            if isinstance(reason, str)
        }
        scored = [row for row in answers if isinstance(row, Row) and row.session_id not in refused]
        return TeacherScores(scored, refused)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _scored(self, row: Row) -> Row | str:
        """The row with the teacher's log-probabilities, or why the teacher refuses it."""
        start = int(np.flatnonzero(row.mask_L)[0]) - 1
        answer = self._ask(row, start)
        if isinstance(answer, str):
            return answer
        logprobs, top = answer
        lp_teacher_L = np.zeros(len(row), np.float32)
        for place in np.flatnonzero(row.mask_L):
            match logprobs[place - start]:
                case [int() | float() as logprob, token_id, *_] if token_id == row.ids_L[place]:
                    lp_teacher_L[place] = logprob
                case other:
                    return f"the teacher answered {other} for token {row.ids_L[place]}"
        if not self._top_k:
            return replace(row, lp_teacher_L=lp_teacher_L)
        try:
            teacher_top = self._top_tokens([top[place - start] for place in np.flatnonzero(row.mask_L)])
        except (IndexError, TypeError, ValueError, OverflowError) as error:
            return f"the teacher did not tell its {self._top_k} most probable tokens: {error}"
        return replace(row, lp_teacher_L=lp_teacher_L, teacher_top=teacher_top)

    def _top_tokens(self, top: list[Any]) -> TopTokens:
        """The most probable tokens at each place. Raises ValueError, TypeError or IndexError for others."""
        found = np.array([[each[:2] for each in tokens[: self._top_k]] for tokens in top], np.float64)
        if found.shape != (len(top), self._top_k, 2):
            raise ValueError(f"{found.shape[1:]} values at each place")
        lp_TK, ids_TK = found[..., 0], found[..., 1]
        if not ((ids_TK >= 0) & (ids_TK < self._vocab_size)).all():
            raise ValueError(f"a token that is none of the policy's {self._vocab_size}")
        if not ((lp_TK > np.finfo(np.float32).min) & (lp_TK <= ROUNDING)).all():
            raise ValueError("a value that is no log-probability")
        return TopTokens(ids_TK.astype(np.int32), lp_TK.astype(np.float32))

    def _ask(self, row: Row, start: int) -> tuple[list[Any], list[Any]] | str:
        """The `input_token_logprobs` of the row from token `start` on, and its `input_top_logprobs`, or why
        the teacher refuses it."""
        body = {
            "input_ids": row.ids_L.tolist(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start,
            **({"top_logprobs_num": self._top_k} if self._top_k else {}),
        }
        try:
            response = self._client.post("/generate", json=body)
        except httpx.HTTPError as error:
            raise TeacherUnavailable(
                f"the teacher at {self._client.base_url} does not answer: {error}"
            ) from error
        if response.status_code == 400:
            return response.text[:200]
        if response.status_code != 200:
            raise TeacherUnavailable(
                f"the teacher at {self._client.base_url} answered with status {response.status_code}"
            )
        try:
            facts = read_json(response.content)["meta_info"]
            logprobs, top = facts["input_token_logprobs"], facts.get("input_top_logprobs") or []
        except (ValueError, KeyError, TypeError) as error:
            raise TeacherUnavailable(
                f"the teacher at {self._client.base_url} sent an answer without log-probabilities: {error}"
            ) from error
        if not isinstance(logprobs, list) or len(logprobs) != len(row) - start:
            count = len(logprobs) if isinstance(logprobs, list) else "no"
            raise TeacherUnavailable(
                f"the teacher sent {count} log-probabilities for {len(row) - start} tokens"
            )
        return logprobs, top
