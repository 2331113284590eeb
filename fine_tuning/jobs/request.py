"""The body of `POST /v1/fine_tuning/jobs`: what a job may ask for. What Weir cannot do is refused by name.

method.reinforcement ─┬─ grader, response_format
                      └─ hyperparameters: n_epochs, compute_multiplier, eval_interval, eval_samples, …
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from reward_service.graders.objects import AnyGrader

WRITTEN: TypeAdapter[Any] = TypeAdapter(Any)
MAX_EPOCHS = 1000
MAX_MULTIPLIER = 128.0
MAX_METADATA = 16
Auto = Literal["auto"]


class JobPart(BaseModel):
    """A part of the body. Unknown fields are refused."""

    # With a bound on strings, pydantic refuses a lone surrogate, which UTF-8 has not.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0, frozen=True)


def _refused(reason: str) -> AfterValidator:
    """Refuses all values but those that ask for nothing."""

    def check(value: Any) -> Any:
        if value not in (None, "auto", []):
            raise ValueError(reason)
        return value

    return AfterValidator(check)


def _storable(value: Any) -> Any:
    """Refuses JSON that no file can hold, or that is nested too deeply to be written again."""
    try:
        json.dumps(value, allow_nan=False)
        WRITTEN.dump_json(value)
    except (ValueError, RecursionError) as error:
        why = "it has NaN, Infinity or half of a surrogate pair, or is nested too deeply"
        raise ValueError(why) from error
    return value


class ReinforcementSettings(JobPart):
    """`hyperparameters` of the method."""

    n_epochs: Auto | Annotated[int, Field(ge=1, le=MAX_EPOCHS)] = "auto"
    """How often each row is played; auto is once."""
    compute_multiplier: Auto | Annotated[float, Field(gt=0, le=MAX_MULTIPLIER)] = "auto"
    """Answers to each row, as a multiple of `fine_tuning.group_size`."""
    eval_interval: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Versions between two evaluations; auto is 10."""
    eval_samples: Auto | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Answers to each row of the validation file in an evaluation; auto is 1."""
    reasoning_effort: Literal["default", "low", "medium", "high"] = "default"
    batch_size: Annotated[
        Any, _refused("the trainer makes its batches by trainer.algorithm, not by job: leave it out")
    ] = "auto"
    learning_rate_multiplier: Annotated[
        Any, _refused("the trainer has its rate from trainer.optimizer, not by job: leave it out")
    ] = "auto"

    @property
    def epochs(self) -> int:
        return 1 if self.n_epochs == "auto" else self.n_epochs

    @property
    def steps_between_evals(self) -> int:
        return 10 if self.eval_interval == "auto" else self.eval_interval

    @property
    def samples(self) -> int:
        return 1 if self.eval_samples == "auto" else self.eval_samples

    @property
    def for_evaluations(self) -> list[str]:
        """The fields that were given, and need a validation file."""
        return [name for name in ("eval_interval", "eval_samples") if getattr(self, name) != "auto"]

    def answers(self, group_size: int) -> int:
        """Answers to one row that are compared: at least two."""
        factor = 1.0 if self.compute_multiplier == "auto" else self.compute_multiplier
        return min(1024, max(2, round(group_size * factor)))


class ReinforcementMethod(JobPart):
    grader: AnyGrader
    response_format: Annotated[dict[str, Any] | None, AfterValidator(_storable)] = None
    """Of every answer, as in chat completions."""
    hyperparameters: ReinforcementSettings = ReinforcementSettings()


class JobMethod(JobPart):
    type: Literal["reinforcement"]
    reinforcement: ReinforcementMethod


MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class JobRequest(JobPart):
    """The body."""

    model: str = Field(min_length=1, max_length=200)
    training_file: str = Field(max_length=200)
    validation_file: str | None = Field(None, max_length=200)
    method: JobMethod
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    suffix: Annotated[
        Any, _refused("a fine-tuned model is a version of the policy, and has its name: leave it out")
    ] = None
    integrations: Annotated[Any, _refused("the trainer logs by trainer.wandb, not by job: leave it out")] = (
        None
    )
    hyperparameters: Annotated[
        Any, _refused("give method.reinforcement.hyperparameters: these are of supervised jobs")
    ] = None
