"""Runs TRL on an experiment's task, in TRL's own environment (`make run/bench/trl/installed`)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from environments.settings import RunSettings
from results.experiment import Experiment, Say
from results.figures import Judged, Spent, TrialResult, curve_of
from results.trial import Place, evaluation_of, services_of_experiment, training_of
from trainer_service.model.settings import LoraSettings

TRL = "trl"
PYTHON = Path("run/bench/trl/bin/python")
LIBRARY = Path("run/environments/reasoning_gym/lib")
"""Its packages are at the end of TRL's path, so that TRL's own win."""
TIMEOUT_S = 7200


def run_trl(experiment: Experiment, name: str, seed: int, place: Place, say: Say) -> TrialResult:
    """Raises CalledProcessError if TRL's process fails."""
    variant = next(iter(experiment.variants.values()))
    training = training_of(experiment, variant, seed)
    trainer = services_of_experiment(experiment, variant, seed)["trainer"]
    wanted = {
        "model": str(experiment.model(place.models, say)),
        "training": _sent(training),
        "evaluation": _sent(evaluation_of(experiment, training)),
        "batch": experiment.trl_batch,
        "optimizer": trainer["optimizer"],
        "lora": LoraSettings(**trainer["lora"]).model_dump() if "lora" in trainer else None,
    }
    packages = [str(each.absolute()) for each in LIBRARY.glob("python*/site-packages")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path("deploy").absolute()), *packages]),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    done = subprocess.run(
        [str(PYTHON), "-m", "results.trl.training"],
        input=json.dumps(wanted),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=TIMEOUT_S,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return TrialResult(
        experiment=experiment.name,
        variant=name,
        seed=seed,
        before=Judged(*found["before"]),
        after=Judged(*found["after"]),
        versions=found["versions"],
        curve=curve_of(found["rewards"], [Spent(*each) for each in found["spent"]]),
        load=round(os.getloadavg()[0], 1),
    )


def _sent(fields: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, in full."""
    settings = RunSettings(**fields)
    return settings.model_dump(mode="json") | {"library": settings.library, "name": settings.name}
