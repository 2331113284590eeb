"""What the graders of clients may ask of the operator's models: which ones, and how many tokens an hour."""

from collections import deque

from reward_service.graders.objects import AnyGrader, LabelModelGrader, ScoreModelGrader, every_grader
from reward_service.judging.models import JudgeAnswer, JudgeCall, JudgeModelClient
from reward_service.judging.settings import JudgeSettings
from rollout_queue import clock
from rollout_queue.http.errors import ApiError

HOUR_S = 3600.0
CHARS_PER_TOKEN = 4
"""Roughly, for a server that does not report its usage."""


class KeyAllowance(JudgeModelClient):
    """Asks models for the graders of one key. The calls of the last hour are counted."""

    def __init__(self, judge: JudgeModelClient, tokens_per_hour: int) -> None:
        self._judge, self._most = judge, tokens_per_hour
        self._spent: deque[tuple[float, int]] = deque()
        self._sum = 0

    async def ask(self, call: JudgeCall) -> JudgeAnswer:
        """Raises JudgeUnavailable, and ApiError (429) if the tokens of the hour are spent."""
        self.check()
        answer = await self._judge.ask(call)
        characters = sum(len(text) for each in call.messages for text in each.values()) + len(answer.text)
        tokens = answer.usage.total_tokens or characters // CHARS_PER_TOKEN
        self._spent.append((clock.monotonic(), tokens))
        self._sum += tokens
        return answer

    def check(self) -> None:
        """Raises ApiError (429)."""
        now = clock.monotonic()
        while self._spent and self._spent[0][0] <= now - HOUR_S:
            self._sum -= self._spent.popleft()[1]
        if self._sum >= self._most:
            wait_s = int(self._spent[0][0] + HOUR_S - now) + 1 if self._spent else int(HOUR_S)
            message = f"the graders of this key may spend {self._most} tokens an hour on models"
            raise ApiError(429, message, headers={"retry-after": str(wait_s)})

    async def close(self) -> None:
        """As the protocol says; the judge is closed by its owner."""


class Allowances:
    """The allowances of all client keys."""

    def __init__(self, judge: JudgeModelClient, settings: JudgeSettings) -> None:
        self._judge, self._settings = judge, settings
        self._of_key: dict[str, KeyAllowance] = {}

    def of(self, key: str, grader: AnyGrader) -> JudgeModelClient:
        """What asks models for the grader. Raises ApiError: 403 for a model that clients may not ask, 429 if
        the key's tokens of the hour are spent."""
        found = self._of_key.setdefault(key, KeyAllowance(self._judge, self._settings.client_tokens_per_hour))
        asked = [
            each.model
            for each in every_grader(grader)
            if isinstance(each, ScoreModelGrader | LabelModelGrader)
        ]
        if refused := [model for model in asked if model not in self._settings.client_models]:
            message = (
                f"grader.model: {refused[0]!r} needs an admin key, or a place in rewards.judge.client_models"
            )
            raise ApiError(403, message, param="grader.model")
        if asked:
            found.check()
        return found
