"""OpenAI's grader objects, checked when they arrive: templates, formulas and names are whole, and bounded.

A grader that was parsed here can be run; what may still be wrong is the sample, the item, or a model.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, model_validator

from reward_service.graders.faults import MalformedGrader
from reward_service.graders.formula import Formula, is_formula_name, parse_formula
from reward_service.graders.similarity_metrics import UNAVAILABLE, SimilarityMetric
from reward_service.graders.string_check import StringOperation
from reward_service.graders.templates import MAX_TEMPLATE_CHARS, parse_template

MAX_SOURCE_CHARS = 2**18
"""OpenAI's limit for the source of a Python grader is 256 kB."""
MAX_GRADERS = 32
"""Graders in one `multi`."""
MAX_MESSAGES = 64
MAX_LABELS = 100


def _checked(text: str) -> str:
    try:
        parse_template(text)
    except MalformedGrader as error:
        raise ValueError(str(error)) from error
    return text


TemplateText = Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS), AfterValidator(_checked)]
"""A text with variables."""


class GraderPart(BaseModel):
    """A part of a grader. Unknown fields are refused, and no type is converted."""

    # With a bound on strings, pydantic refuses a lone surrogate (half a UTF-16 pair), which UTF-8 has not.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0, frozen=True)


class NamedGrader(GraderPart):
    """What all graders have. OpenAI's guide also shows graders without a name."""

    name: str = Field("", max_length=200)


class StringCheckGrader(NamedGrader):
    type: Literal["string_check"]
    input: TemplateText
    reference: TemplateText
    operation: StringOperation


def _available(metric: SimilarityMetric) -> SimilarityMetric:
    if reason := UNAVAILABLE.get(metric):
        raise ValueError(reason)
    return metric


class TextSimilarityGrader(NamedGrader):
    type: Literal["text_similarity"]
    input: TemplateText
    reference: TemplateText
    evaluation_metric: Annotated[SimilarityMetric, AfterValidator(_available)]
    pass_threshold: FiniteFloat | None = None
    """OpenAI's evals use it; a reward does not."""


class PythonGrader(NamedGrader):
    type: Literal["python"]
    source: str = Field(max_length=MAX_SOURCE_CHARS)
    image_tag: str | None = Field(None, max_length=200)
    """OpenAI chooses the libraries by it; here every grader gets those of one interpreter."""


class JudgeText(GraderPart):
    """A text in a message. Images and sound are not read here."""

    type: Literal["input_text", "output_text"]
    text: TemplateText


JudgeContent = (
    TemplateText | JudgeText | Annotated[list[TemplateText | JudgeText], Field(max_length=MAX_MESSAGES)]
)


class JudgeMessage(GraderPart):
    """A message to the model that grades."""

    role: Literal["user", "assistant", "system", "developer"]
    content: JudgeContent
    type: Literal["message"] | None = None

    @property
    def text(self) -> str:
        """The whole content as one template."""
        parts = self.content if isinstance(self.content, list) else [self.content]
        return "\n".join(part.text if isinstance(part, JudgeText) else part for part in parts)


class JudgeSampling(GraderPart):
    """How the model that grades samples; null leaves it to the model's server."""

    max_completions_tokens: int | None = Field(None, ge=1, le=2**31)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)


JudgeInput = Annotated[list[JudgeMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
JudgeModel = Annotated[str, Field(min_length=1, max_length=200)]


class ScoreModelGrader(NamedGrader):
    type: Literal["score_model"]
    input: JudgeInput
    model: JudgeModel
    range: Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    sampling_params: JudgeSampling | None = None
    pass_threshold: FiniteFloat | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "ScoreModelGrader":
        if self.range[0] >= self.range[1]:
            raise ValueError("range: the first number is the lower one")
        return self


Label = Annotated[str, Field(min_length=1, max_length=200)]
Labels = Annotated[list[Label], Field(min_length=1, max_length=MAX_LABELS)]


class LabelModelGrader(NamedGrader):
    type: Literal["label_model"]
    input: JudgeInput
    model: JudgeModel
    labels: Labels
    passing_labels: Labels
    sampling_params: JudgeSampling | None = None

    @model_validator(mode="after")
    def _known(self) -> "LabelModelGrader":
        if unknown := set(self.passing_labels) - set(self.labels):
            raise ValueError(f"passing_labels: {sorted(unknown)[0]!r} is not one of the labels")
        return self


SingleGrader = Annotated[
    StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader | LabelModelGrader,
    Discriminator("type"),
]


class MultiGrader(NamedGrader):
    """Graders whose scores a formula combines. They are no `multi` graders themselves."""

    type: Literal["multi"]
    graders: Annotated[dict[str, SingleGrader], Field(min_length=1, max_length=MAX_GRADERS)]
    """By the names that the formula has for them."""
    calculate_output: str

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """OpenAI's SDK types `graders` as one grader; its guide and its API have an object of graders."""
        graders = given.get("graders") if isinstance(given, dict) else None
        if isinstance(graders, dict) and isinstance(graders.get("type"), str):
            return {**given, "graders": {str(graders.get("name", "")): graders}}
        return given

    @model_validator(mode="after")
    def _whole(self) -> "MultiGrader":
        for name in self.graders:
            if not is_formula_name(name):
                raise ValueError(f"graders: a formula cannot name a grader {name[:200]!r}")
        try:
            parse_formula(self.calculate_output, self.graders)
        except MalformedGrader as error:
            raise ValueError(f"calculate_output: {error}") from error
        return self

    @property
    def formula(self) -> Formula:
        return parse_formula(self.calculate_output, self.graders)


AnyGrader = Annotated[
    StringCheckGrader
    | TextSimilarityGrader
    | PythonGrader
    | ScoreModelGrader
    | LabelModelGrader
    | MultiGrader,
    Discriminator("type"),
]


def every_grader(grader: AnyGrader) -> Iterator[AnyGrader]:
    """The grader, and those in it."""
    yield grader
    if isinstance(grader, MultiGrader):
        yield from grader.graders.values()


def brings_python(grader: AnyGrader) -> bool:
    """Whether the grader, or one in it, is a program."""
    return any(isinstance(each, PythonGrader) for each in every_grader(grader))
