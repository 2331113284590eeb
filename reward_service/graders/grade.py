"""What a grader reads and finds: OpenAI's namespace `sample`, the reward with OpenAI's names, and what can
be wrong with a grader, or with what it is given.

GraderFault
├── MalformedGrader      the grader cannot work with any sample
├── UnusableSource       the source of a Python grader cannot be loaded, or has no function `grade`
└── UngradableSample     the grader cannot work with this sample
    ├── UnknownVariable
    ├── SampleNotJson
    ├── TextTooLong
    └── FormulaUndefined
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn


@dataclass(frozen=True)
class GradeErrors:
    """What went wrong. The reward of a grader with an error is 0, and stands for nothing."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    """The model that grades was cut off."""
    unresponsive_reward_error: bool = False
    """The grader did not end in time."""
    invalid_variable_error: bool = False
    other_error: bool = False
    python_grader_server_error: bool = False
    """The process of a Python grader was ended: by its limits, or by itself."""
    python_grader_server_error_type: str | None = None
    python_grader_runtime_error: bool = False
    """The source of a Python grader raised, or did not return a number."""
    python_grader_runtime_error_details: str | None = None
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    model_grader_refusal_error: bool = False
    model_grader_parse_error: bool = False

    @property
    def any(self) -> bool:
        return any(vars(self).values())

    def joined(self, other: "GradeErrors") -> "GradeErrors":
        """The errors of both; a text is that of the first that has one."""
        return GradeErrors(**{name: value or getattr(other, name) for name, value in vars(self).items()})

    def __str__(self) -> str:
        return ", ".join(
            f"{name}: {value}" if isinstance(value, str) else name
            for name, value in vars(self).items()
            if value
        )


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of the calls to one model."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return dataclasses.replace(self, **sums)


@dataclass(frozen=True)
class Grade:
    """The result of one grader, or of a `multi` grader and all in it."""

    reward: float
    """Finite."""
    errors: GradeErrors = GradeErrors()
    sub_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of the graders of a `multi` grader, by their names in its formula."""
    usage: Mapping[str, TokenUsage] = field(default_factory=dict)
    """By the name of the model that graded."""
    sampled_model: str | None = None
    """The model that answered a grader which asks one."""

    @classmethod
    def failed(cls, **errors: bool | str | None) -> "Grade":
        return cls(0.0, GradeErrors(**errors))  # type: ignore[arg-type]  # the names are those of the fields


class GraderFault(Exception):
    """A grader cannot give a score."""


class MalformedGrader(GraderFault):
    """The grader cannot work with any sample."""


class UnusableSource(GraderFault):
    """The source of a Python grader cannot be loaded, or has no function `grade`. `where`: its path in the
    grader."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where = where


class UngradableSample(GraderFault):
    """The grader cannot work with this sample and item."""


class UnknownVariable(UngradableSample):
    """A template names a variable that the sample or the item does not have."""


class SampleNotJson(UngradableSample):
    """A template names `sample.output_json`, and the model's output is not JSON."""


class TextTooLong(UngradableSample):
    """A text is longer than the grader reads."""


class FormulaUndefined(UngradableSample):
    """A formula has no finite value for these scores, as in a division by zero."""


def sample_of(
    text: str, message: Mapping[str, Any] | None = None, finish_reason: str = "stop"
) -> dict[str, Any]:
    """The answer with this text. `message` is the whole message of the answer, with its tool calls.

    `output_json` is there if the text is JSON.
    """
    whole = dict(message or {"role": "assistant", "content": text})
    sample = {
        "output_text": text,
        "output_tools": whole.get("tool_calls") or [],
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": whole}],
    }
    try:
        return sample | {"output_json": json.loads(text, parse_constant=_refuse)}
    except (ValueError, RecursionError):
        return sample


def _refuse(constant: str) -> NoReturn:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
