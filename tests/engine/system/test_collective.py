"""The whole loop with tensors that the trainer sends to the engine: every version answers, with the trainer's
own weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.system.real_system import System, system_settings
from tests.support.waiting import wait_until
from weir.stack.stack import Stack

pytestmark = pytest.mark.long


@pytest.fixture
def sending_system(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    settings = system_settings(tmp_path, tiny_model)
    trainer = {**settings.services["trainer"], "transport": "collective"}
    settings = settings.model_copy(update={"services": {**settings.services, "trainer": trainer}})
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=1200)
        yield System(stack, settings)


def test_versions_reach_the_engine_without_files(sending_system: System, tiny_model: Path) -> None:
    system = sending_system
    for _ in range(3):
        before = system.serving()
        system.train_one_group()
        wait_until(lambda: system.serving() > before)  # noqa: B023 - called in the same iteration
        engine = system.get("/model_info", url=system.engine_url)
        assert engine["weight_version"] == str(system.serving())
        # After a load of files, it would be their directory.
        assert Path(engine["model_path"]) == tiny_model.absolute()
    metrics = system.trainer("/status")["metrics"]
    assert metrics["mismatch/abs_logp"] < 1e-4, "the engine samples with the weights that the trainer has"
