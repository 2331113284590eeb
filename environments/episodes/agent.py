"""An agent in an episode: calls the model in its session, and keeps its conversation and its rewards."""

from collections.abc import Iterable, Mapping
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

from environments.outcome import TurnReward
from environments.step import Message


class Agent:
    """`sampling` are parameters of chat completions; the session's own win over them where it enforces
    them."""

    def __init__(self, client: AsyncOpenAI, model: str, sampling: Mapping[str, Any]) -> None:
        self._client, self._model, self._sampling = client, model, dict(sampling)
        self.messages: list[Message] = []
        self.rewards: list[TurnReward] = []
        self.turn_ids: list[str] = []
        self.finish_reason = ""
        """Why the last answer ended."""
        self.final: float | None = None
        self.judged = False
        """Whether any answer has a reward, also one of 0."""
        self.metrics: dict[str, float] = {}

    def hears(self, messages: Iterable[Message]) -> None:
        self.messages.extend(messages)

    async def answer(self, tools: Iterable[dict[str, Any]] = ()) -> ChatCompletionMessage:
        """The model's next message, which becomes part of the conversation. Raises OpenAIError."""
        offered: Any = {"tools": given} if (given := list(tools)) else {}
        asked: Any = self.messages
        completion = await self._client.chat.completions.create(
            model=self._model, messages=asked, **offered, **self._sampling
        )
        message: ChatCompletionMessage = completion.choices[0].message
        self.turn_ids.append(completion.id)
        self.finish_reason = completion.choices[0].finish_reason
        self.messages.append(message.model_dump(exclude_none=True))
        return message

    def earns(self, reward: float | None, ended: bool) -> None:
        """Credit a reward to the last answer, or to the whole episode if it has ended."""
        if reward is None:
            return
        self.judged = True
        if ended or not self.turn_ids:
            self.final = (self.final or 0.0) + reward
        else:
            self.rewards.append(TurnReward(self.turn_ids[-1], reward))
