"""What can be wrong with a grader, or with what it is given.

GraderFault
├── MalformedGrader      the grader cannot work with any sample
├── UnusableSource       the source of a Python grader cannot be loaded, or has no function `grade`
└── UngradableSample     the grader cannot work with this sample
    ├── UnknownVariable
    ├── SampleNotJson
    ├── TextTooLong
    └── FormulaUndefined
"""


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
