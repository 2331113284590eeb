"""The settings of what follows a loss: the KL penalty, and the weight of each token."""

from typing import Literal

from pydantic import Field, model_validator

from trainer_service.algorithms.corrections.settings import Above0, AtLeast0, Frozen

KL_HORIZON = 10_000.0


class Kl(Frozen):
    """The KL penalty towards the reference policy."""

    estimator: Literal["k1", "abs", "k2", "k3", "low_var", "k3_plus", "unbiased"] = "k3"
    coefficient: AtLeast0 = 0.0
    target: Above0 | None = None
    """If set, `coefficient` is only the first one. After each step it rises if the KL, in nats per token, was
    above the target, and falls if it was below."""
    reference_every_steps: int | None = Field(None, ge=1)
    """After every so many steps, the reference becomes the policy of now. None: it stays the base model."""
    horizon: Above0 = KL_HORIZON
    """For `target`: in so many rollouts, the coefficient changes by the relative error, at most 20 %."""

    @model_validator(mode="after")
    def _pulls(self) -> "Kl":
        if self.target is not None and not self.coefficient:
            raise ValueError("kl: target multiplies the coefficient, so the first one must be above 0")
        if self.coefficient and self.estimator == "k1":
            raise ValueError(
                "kl: the gradient of k1 is 1 for every policy, so as a loss it does not pull to the reference"
            )
        return self


class Aggregation(Frozen):
    """The weight of each token in the sum over the optimizer step."""

    mode: Literal[
        "token_mean",
        "token_sum",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "prompt_mean",
        "rollout_mean",
        "fixed_denominator",
    ] = "token_mean"
    horizon: float | None = Field(None, gt=0)
    """The number of tokens by which `seq_mean_token_sum_norm` divides the sum of each row."""
    denominator: float | None = Field(None, gt=0)
    """The number of tokens by which `fixed_denominator` divides the sum of the step."""

    @model_validator(mode="after")
    def _length_fits(self) -> "Aggregation":
        for mode, field in (("seq_mean_token_sum_norm", "horizon"), ("fixed_denominator", "denominator")):
            if (getattr(self, field) is not None) != (self.mode == mode):
                raise ValueError(f"aggregation: {field} belongs to {mode}, which needs it")
        return self
