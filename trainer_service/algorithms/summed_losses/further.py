"""Losses of the training by turns that a user's own loop may ask for, too, by the same names.

They are those whose plain sum over targets has a meaning, and which leave a target with advantage 0 alone:
loops give prompts this advantage. Both the policy before the step and the one that sampled are `logprobs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from trainer_service.algorithms.losses.registry import LOSSES
from trainer_service.algorithms.losses.step_statistics import StepStatistics
from trainer_service.algorithms.tokens import Tokens

NAMES = ("reinforce", "sapo", "dppo", "glm5")
NOT_SETTINGS = {
    "name",
    "anchor",  # there is one policy that a ratio can have in its denominator
    "kappa",  # it pulls targets with advantage 0
}


class SettingRefused(Exception):
    """A setting has a value that it cannot have. The message is for the user."""


@dataclass(frozen=True)
class FurtherLoss:
    """One of the losses. It is sent to all ranks."""

    name: str

    @property
    def defaults(self) -> dict[str, float | str]:
        """The settings by name."""
        fields = LOSSES[self.name].settings.model_fields
        return {each: field.default for each, field in fields.items() if each not in NOT_SETTINGS}

    def check(self, config: Mapping[str, float | str]) -> None:
        """Raises SettingRefused."""
        self._settings(config)

    def __call__(
        self, lp_TK: Tensor, inputs: Mapping[str, Tensor], rows_T: Tensor, config: Mapping[str, float | str]
    ) -> Tensor:
        """[T, 1]: the loss of each target."""
        sampled_T = inputs["logprobs"][:, 0]
        tokens = Tokens(lp_TK[:, 0], sampled_T, sampled_T, inputs["advantages"][:, 0], rows_T)
        found = LOSSES[self.name].losses(tokens, self._settings(config), StepStatistics())
        return found.loss_T[:, None]

    def _settings(self, config: Mapping[str, float | str]) -> Any:
        try:
            return LOSSES[self.name].settings.model_validate(dict(config))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            setting = ".".join(map(str, first["loc"]))
            raise SettingRefused(f"{setting} {config.get(setting)!r}: {first['msg']}") from error
