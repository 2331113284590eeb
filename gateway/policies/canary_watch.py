"""A gateway's part in the canary: which arm a call belongs to, and what is noted of it.

call ─▶ arm_of its group ─▶ answered, failed ─▶ queue ─▶ weir:canary_log
                               └─ some answers of the canary ─▶ both versions score them ─┘

The KL divergence is measured on the tokens that the canary sampled, by the estimator k3 of
http://joschu.net/blog/kl-approx.html: with d = log p_served - log p_tried, its mean is exp(d) - 1 - d. Both
log-probabilities come from a prefill of the same tokens, at temperature 1.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from redis.asyncio import Redis

from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer
from gateway.fleet.generate_request import AllowedVersions
from gateway.fleet.placement import choose_server
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.contract.records import Span
from rollout_queue.contract.serving_plan import Arm, Canary, CanaryCall, CanaryRecord, CanaryScore
from rollout_queue.foreign_json import read_json
from rollout_queue.protocol.message import ServiceMessage
from rollout_queue.redis.plan_store import CanaryLog

logger = logging.getLogger(__name__)

KNOWN_GROUPS = 10_000
NOTES_WAITING = 1_000
ANSWERS_WAITING = 2
"""How many answers wait for a score; the canary's others are not scored."""
SCORE_TIMEOUT_S = 60.0
MOST_TOKENS = 32_768
"""Longer contexts are not scored."""
LARGEST_DIFFERENCE = 20.0
"""A larger d counts as this: exp(d) would drown all other tokens."""


class ScoreBody(ServiceMessage):
    """A request to an engine for the log-probabilities of tokens that it is given."""

    input_ids: list[int]
    sampling_params: dict[str, float] = {"temperature": 1.0, "max_new_tokens": 1}
    return_logprob: bool = True
    logprob_start_len: int
    lora_path: str | None = None
    """The adapter that scores; None for the engine's weights alone."""


class NotScored(Exception):
    """An engine gave no usable score."""


@dataclass(frozen=True)
class Trial:
    """The part of a call in an open canary."""

    canary: Canary
    arm: Arm
    group: str
    session: str

    @property
    def allowed(self) -> AllowedVersions:
        return AllowedVersions(prefers=self.canary.version if self.arm == "canary" else None)

    def call(self, versions: Sequence[Span], tokens: int) -> CanaryCall:
        """The record of a call. It has failed if versions of the other arm had to answer it."""
        tried = {span.version == self.canary.version for span in versions}
        return CanaryCall(
            canary=self.canary.id,
            arm=self.arm,
            group=self.group,
            session=self.session,
            tokens=tokens,
            ok=tried == {self.arm == "canary"},
        )


@dataclass(frozen=True)
class _Answer:
    """An answer of the canary that waits for its score."""

    trial: Trial
    prompt_ids: TokenIds
    output_ids: Sequence[int]


class CanaryWatch:
    """Calls ask for their arm, and note how they ended; `write` and `score` run in the background."""

    def __init__(self, redis: Redis, fleet: Fleet) -> None:
        self._fleet, self._engine, self._log = fleet, fleet.engine, CanaryLog(redis)
        self._opened: dict[str, float | None] = {}
        """When groups were opened, as far as this gateway has asked."""
        self._notes: asyncio.Queue[CanaryRecord] = asyncio.Queue(NOTES_WAITING)
        self._answers: asyncio.Queue[_Answer] = asyncio.Queue(ANSWERS_WAITING)

    async def trial(self, head: SessionHead) -> Trial | None:
        """The part of a session's calls in the canary; None without one, for evaluations, and for groups that
        were opened earlier."""
        canary, spec = self._fleet.plan.canary, head.spec
        if canary is None or canary.state != "open" or not spec.train:
            return None
        if spec.group_id is None or canary.sticky == "session":
            group = spec.session_id
            arm = canary.arm_of(group, spec.created_at)
        else:
            group = spec.group_id
            arm = canary.arm_of(group, await self._group_opened_at(head, group))
        return None if arm is None else Trial(canary, arm, group, spec.session_id)

    def answered(
        self,
        trial: Trial,
        versions: Sequence[Span],
        prompt_ids: TokenIds,
        output_ids: Sequence[int],
        can_be_scored: bool = True,
    ) -> None:
        """A call has its answer. One to a prompt with images cannot be scored."""
        call = trial.call(versions, len(output_ids))
        self._note(call)
        short = len(prompt_ids) + len(output_ids) <= MOST_TOKENS
        scored = can_be_scored and trial.arm == "canary" and output_ids and short
        if call.ok and scored and not self._answers.full():
            self._answers.put_nowait(_Answer(trial, prompt_ids, output_ids))

    def failed(self, trial: Trial) -> None:
        """No engine has answered a call."""
        self._note(trial.call((), 0))

    async def write(self) -> None:
        """Write one note, once there is one."""
        record = await self._notes.get()
        try:
            await self._log.note(record)
        except StorageUnavailable as error:
            logger.warning("a call of the canary is not noted: %s", error)

    async def score(self) -> None:
        """Score one answer, once there is one."""
        answer = await self._answers.get()
        canary = answer.trial.canary
        if self._fleet.plan.active_canary is None:
            return
        try:
            async with clock.timeout(SCORE_TIMEOUT_S):
                tried, served = await asyncio.gather(
                    self._logprobs(answer, canary.version), self._logprobs(answer, canary.baseline)
                )
        except (NotScored, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            logger.warning("an answer of the canary of version %d has no score: %r", canary.version, error)
            return
        kl = sum(k3(lp_served - lp_tried) for lp_tried, lp_served in zip(tried, served, strict=True))
        score = CanaryScore(canary=canary.id, group=answer.trial.group, tokens=len(tried), kl=kl)
        self._note(score)

    async def _group_opened_at(self, head: SessionHead, group: str) -> float | None:
        if group not in self._opened:
            try:
                opened_at = await self._log.group_opened_at(group)
            except StorageUnavailable:
                return None
            if opened_at is None and not head.stored:
                return head.spec.created_at  # its first call opens it
            if len(self._opened) >= KNOWN_GROUPS:
                self._opened.clear()
            self._opened[group] = opened_at
        return self._opened[group]

    def _note(self, record: CanaryRecord) -> None:
        if self._notes.full():
            logger.warning("more calls of the canary end than can be noted")
        else:
            self._notes.put_nowait(record)

    async def _logprobs(self, answer: _Answer, version: int) -> list[float]:
        """The log-probability of each token of the answer under a version. Raises NotScored."""
        server = self._server_of(answer.trial.group, version)
        ids, start = [*answer.prompt_ids.tolist(), *answer.output_ids], len(answer.prompt_ids)
        adapter = server.adapter_of(version)
        lora_path = None if adapter is None else adapter.name
        body = ScoreBody(input_ids=ids, logprob_start_len=start - 1, lora_path=lora_path)
        status, raw = await self._engine.post(
            f"{server.registration.engine_url}/generate", body, SCORE_TIMEOUT_S
        )
        if status != 200:
            raise NotScored(f"{server.id} answered {status}")
        try:
            meta = read_json(raw)["meta_info"]
            found = [(float(lp), int(token)) for lp, token, *_ in meta["input_token_logprobs"][1:]]
            scored_by = str(meta["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise NotScored(f"{server.id} sent no log-probabilities: {error!r}") from error
        if adapter is None and scored_by != str(version):
            raise NotScored(f"{server.id} serves version {scored_by} by now")
        if [token for _, token in found] != list(answer.output_ids):
            raise NotScored(f"{server.id} scored other tokens")
        return [lp for lp, _ in found]

    def _server_of(self, group: str, version: int) -> FleetServer:
        servers = self._fleet.servers.values()
        able = [each for each in servers if each.can_answer(version) and each.takes_calls]
        if (server := choose_server(able, group)) is None:
            raise NotScored(f"no server serves version {version}")
        return server


def k3(d: float) -> float:
    """The estimate of the divergence from one token; never negative, and 0 for equal log-probabilities."""
    d = min(d, LARGEST_DIFFERENCE)
    return math.expm1(d) - d
