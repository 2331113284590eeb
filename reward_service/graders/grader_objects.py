"""OpenAI's grader objects, checked when they arrive: templates, formulas and names are whole, and bounded.

A grader that was parsed here can be run; what may still be wrong is the sample, the item, or a model.

The formula of a `multi` grader is arithmetic on the scores of its graders:

text ── parse_formula ──▶ Formula ── value(scores) ──▶ float

The operators are + - * / ^ and the functions those of OpenAI. Python's parser reads the text, and only the
nodes below are evaluated; no Python is executed.
"""

import ast
import keyword
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, model_validator

from reward_service.graders.comparisons import UNAVAILABLE, SimilarityMetric, StringOperation
from reward_service.graders.grade import FormulaUndefined, MalformedGrader
from reward_service.graders.grader_templates import MAX_TEMPLATE_CHARS, parse_template

MAX_FORMULA_CHARS = 2000
MAX_FORMULA_NODES = 300
MAX_FORMULA_DEPTH = 100
"""A sum of n terms has n levels."""

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
"""`log` is the natural logarithm."""
OF_SEVERAL = frozenset({"min", "max"})
"""These functions take one argument or more; the others take one."""


def is_formula_name(name: str) -> bool:
    """Whether a formula can name a grader so."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


@dataclass(frozen=True)
class Formula:
    """A checked formula."""

    tree: ast.expr

    def value(self, scores: Mapping[str, float]) -> float:
        """A finite number. Raises FormulaUndefined."""
        try:
            value = float(_evaluate(self.tree, scores))
        except (ArithmeticError, ValueError) as error:
            raise FormulaUndefined(f"the formula has no value: {error}") from error
        if not math.isfinite(value):
            raise FormulaUndefined(f"the formula's value is {value}")
        return value


def parse_formula(text: str, names: Collection[str]) -> Formula:
    """`names`: the graders that the formula may name. Raises MalformedGrader."""
    if len(text) > MAX_FORMULA_CHARS:
        raise MalformedGrader(f"the formula is longer than {MAX_FORMULA_CHARS} characters")
    if "**" in text:
        raise MalformedGrader("the formula has **: a power is written with ^")
    try:
        # In Python ^ is another operator, of a lower rank than +.
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedGrader("the formula cannot be parsed") from error
    nodes = _check(tree, frozenset(names), MAX_FORMULA_DEPTH)
    if nodes > MAX_FORMULA_NODES:
        raise MalformedGrader(f"the formula has more than {MAX_FORMULA_NODES} parts")
    return Formula(tree)


def _check(node: ast.expr, names: frozenset[str], depth: int) -> int:
    """The number of nodes of the tree. Raises MalformedGrader for a node that is no arithmetic."""
    if depth == 0:
        raise MalformedGrader(f"the formula nests deeper than {MAX_FORMULA_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            inside: list[ast.expr] = []
        case ast.Name(id=name):
            if name not in names:
                raise MalformedGrader(f"the formula names {name!r}, and there is no such grader")
            inside = []
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            inside = [node.left, node.right]
        case ast.UnaryOp(op=sign) if type(sign) in SIGNS:
            inside = [node.operand]
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            inside = node.args
            if not inside or (len(inside) > 1 and name not in OF_SEVERAL):
                raise MalformedGrader(f"{name} does not take {len(inside)} arguments")
        case _:
            raise MalformedGrader(
                "the formula has something other than numbers, graders, + - * / ^ and the functions "
                + ", ".join(FUNCTIONS)
            )
    return 1 + sum(_check(each, names, depth - 1) for each in inside)


def _evaluate(node: Any, scores: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return scores[name]
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_evaluate(left, scores), _evaluate(right, scores))
        case ast.UnaryOp(op=sign, operand=operand):
            return SIGNS[type(sign)](_evaluate(operand, scores))
        case _:
            given = [_evaluate(each, scores) for each in node.args]
            name = node.func.id
            return FUNCTIONS[name](given) if name in OF_SEVERAL else FUNCTIONS[name](*given)


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


class BodyPart(BaseModel):
    """A part of a body. Unknown fields are refused, and no type is converted."""

    # With a bound on strings, pydantic refuses a lone surrogate (half a UTF-16 pair), which UTF-8 has not.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0, frozen=True)


class NamedGrader(BodyPart):
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


class JudgeText(BodyPart):
    """A text in a message. Images and sound are not read here."""

    type: Literal["input_text", "output_text"]
    text: TemplateText


JudgeContent = (
    TemplateText | JudgeText | Annotated[list[TemplateText | JudgeText], Field(max_length=MAX_MESSAGES)]
)


class JudgeMessage(BodyPart):
    """A message to the model that grades."""

    role: Literal["user", "assistant", "system", "developer"]
    content: JudgeContent
    type: Literal["message"] | None = None

    @property
    def text(self) -> str:
        """The whole content as one template."""
        parts = self.content if isinstance(self.content, list) else [self.content]
        return "\n".join(part.text if isinstance(part, JudgeText) else part for part in parts)


class JudgeSampling(BodyPart):
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
