"""What SmolLM2-135M-Instruct learns, a model that others have trained; an adapter of rank 16 is trained."""

from pathlib import Path

from results.experiment import Experiment, Say, Variant
from weir.demo import real_demo
from weir.stack.settings import StackSettings


def model(models: Path, say: Say) -> Path:
    directory = models / real_demo.NAME
    real_demo.make_model(directory, StackSettings().engine_python, say)
    return directory


EXTRACTION = Experiment(
    name="extraction",
    question="Write what a sentence says about a person as one JSON object, the task of `weir demo --model "
    "smollm2`.",
    warm_start="SmolLM2-135M-Instruct as it is published. An adapter of rank 16 is trained, at a rate of "
    "3e-4",
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
    found="Eleven or twelve steps teach the task. The machine had other work, so seconds say little.",
)
