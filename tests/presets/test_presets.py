"""Every preset trains the demo on the real stack for some steps, without a warning (`make test-presets`)."""

import asyncio
import re
from pathlib import Path

import pytest

from bench.isolated_stack import isolated_stack
from bench.processes import free_port
from trainer_service.algorithms.settings import PRESETS
from weir.demo.demo_episodes import EpisodeLog, EpisodeRunner
from weir.demo.make_model import model_for
from weir.demo.settings import services_of_demo
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

STEPS = 5
WARNED = re.compile(r"WARNING|ERROR|Warning:")
"""Matches warnings and errors in the formats of logging, DeepSpeed and Python."""


def settings_of(preset: str, run_dir: Path) -> StackSettings:
    engine_port = free_port()
    trainer: dict[str, object] = {"algorithm": {"preset": preset, "flush_after_s": 5.0}}
    if preset == "opd":  # the policy's own engine plays the teacher, so that the two agree closely
        trainer["teacher"] = {"url": f"http://127.0.0.1:{engine_port}"}
    model, _ = model_for(Path("run/models"), 0)
    return isolated_stack(run_dir, model, merged(services_of_demo(0), {"trainer": trainer}), engine_port)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_trains_the_demo(preset: str, tmp_path: Path) -> None:
    settings = settings_of(preset, tmp_path)
    steps = tmp_path / "metrics.jsonl"

    def enough(so_far: EpisodeLog) -> bool:
        made = len(steps.read_text(encoding="utf-8").splitlines()) if steps.exists() else 0
        return made >= STEPS or len(so_far.episodes) > 2000

    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=1200)
        playing = EpisodeRunner(
            stack.gateway_url, settings.client_keys[0], group_size=8, groups_in_flight=8, seed=0
        )
        record = asyncio.run(playing.play(enough))
    assert len(steps.read_text(encoding="utf-8").splitlines()) >= STEPS
    assert record.failures == 0
    log = (tmp_path / "logs" / "trainer_service.log").read_text(encoding="utf-8")
    assert not [line for line in log.splitlines() if WARNED.search(line)]
