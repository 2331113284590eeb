"""What SmolLM2-135M-Instruct learns, a model that others have trained; an adapter of rank 16 is trained."""

from pathlib import Path
from typing import Any

from results.experiment import Experiment, Say, Variant
from weir.demo import real_demo
from weir.stack.services import merged
from weir.stack.settings import StackSettings


def model(models: Path, say: Say) -> Path:
    directory = models / real_demo.NAME
    real_demo.make_model(directory, StackSettings().engine_python, say)
    return directory


WARM_START = "SmolLM2-135M-Instruct as it is published. An adapter of rank 16 is trained, at a rate of 3e-4"
BOUNDED: dict[str, Any] = {
    "trainer": {"algorithm": {"max_rows": 32}},
    "gateway": {"limits": {"staleness_versions": 2}},
}
"""As much is learned from an episode on a busy machine as on an idle one."""


EXTRACTION = Experiment(
    name="extraction",
    question="Write what a sentence says about a person as one JSON object, the task of `weir demo --model "
    "smollm2`.",
    warm_start=WARM_START,
    model=model,
    run={
        "environment": "python:weir.demo.extraction:Extraction",
        "sampling": {"max_tokens": 40},
        "episodes": 512,
    },
    target=0.6,
    variants={"async": Variant("rollouts up to eight versions old")},
    services=real_demo.SERVICES,
    judged={"tasks": 64, "group_size": 2},
    trl_batch=32,
    found="Eleven or twelve steps teach the task. To the target, Weir takes half of TRL's CPU seconds: 374 "
    "against 756 in the mean. The machine had other work, so seconds say little.",
)
LOOKUP = Experiment(
    name="lookup",
    question="Ask a register with one JSON object, then answer a question with another: a call and its use, "
    "each worth a half, in two turns.",
    warm_start=WARM_START,
    model=model,
    run={
        "environment": "python:results.environments.lookup:Lookup",
        "sampling": {"max_tokens": 24},
        "episodes": 512,
    },
    target=0.7,
    variants={"bounded": Variant("rollouts at most two versions old, 32 rows a step")},
    services=merged(real_demo.SERVICES, BOUNDED),
    judged={"tasks": 64, "group_size": 2},
    found="Nine to twelve steps teach the call to all seeds. One also learns the answer; the other two have "
    "it right in half of the episodes.",
)
GCD = Experiment(
    name="gcd",
    question="The greatest common divisor of two numbers up to 30, by reasoning-gym, after four solved "
    "questions.",
    warm_start=WARM_START,
    model=model,
    run={
        "environment": "reasoning_gym:gcd",
        "options": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30, "examples": 4},
        "sampling": {"max_tokens": 6},
        "episodes": 512,
    },
    target=0.3,
    variants={"bounded": Variant("rollouts at most two versions old, 32 rows a step")},
    services=merged(real_demo.SERVICES, BOUNDED),
    judged={"tasks": 128, "group_size": 1},
    found="Always the most frequent answer, 2, is worth 0.33, and 512 episodes teach little more: one of "
    "three seeds does not reach 0.3.",
)
