"""What an experiment is: an environment, a first model, and variants that differ in what is asked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Say = Callable[[str], None]


@dataclass(frozen=True)
class Variant:
    """What a variant changes: sections of weir.yaml, and fields of the run's settings."""

    meaning: str
    services: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One question, with the runs that answer it. All of them begin with the same model."""

    name: str
    question: str
    """Sentences for the reader of the results."""
    warm_start: str
    """How the first model was made, in a sentence."""
    model: Callable[[Path, Say], Path]
    """Makes the first model in a directory of models, or finds it there, and returns its own directory."""
    run: Mapping[str, Any]
    """Fields of `environments.settings.RunSettings`; `episodes` is how long a run is."""
    target: float
    """A mean reward; the results say how much it took to reach it."""
    variants: Mapping[str, Variant]
    services: Mapping[str, Any] = field(default_factory=dict)
    """Sections of weir.yaml of all variants."""
    judged: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the run's settings in the evaluations before and after."""
    judged_on: str = "other tasks"
    against_first: bool = False
    """A second engine keeps the first model, as `policy@0`: an opponent that does not learn."""
    found: str = ""
    """What the runs say, in sentences."""
    trl_batch: int = 0
    """How many answers a step of TRL has; 0 if TRL cannot express the task as one question and one answer."""
