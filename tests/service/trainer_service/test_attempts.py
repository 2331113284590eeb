"""A group that ends the trainer's process is found over restarts, and the others are trained."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollout_queue.contract.errors import LeaseLost
from tests.support.trainer_service.harness import Harness, MakeHarness
from trainer_service.model.policy import DeepSpeedPolicy
from trainer_service.rows.rows import MicroBatch
from trainer_service.status.heartbeat import Stopped

FITS = 40
"""How many tokens of a micro-batch fit into the memory, in these tests."""


class MemoryIsUsedUp(BaseException):
    """Stands for the signal with which the kernel ends a process whose memory is used up."""


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def killing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(policy: DeepSpeedPolicy, batch: MicroBatch, *given: Any) -> Any:
            if len(batch.ids_N) > FITS:
                raise MemoryIsUsedUp
            return compute(policy, batch, *given)

        return computed

    for name in ("logprobs", "scores", "gradient_norm"):
        monkeypatch.setattr(DeepSpeedPolicy, name, killing(getattr(DeepSpeedPolicy, name)))


def processes(harness: Harness, done: Callable[[Harness], bool]) -> Iterator[Harness]:
    """The processes that it takes until `done`, each begun after the last one was killed."""
    yield harness
    while not done(harness):
        try:
            harness.trainer.run_once()
        except MemoryIsUsedUp:
            harness = harness.restart()
            yield harness


def trained(harness: Harness, *sessions: str) -> bool:
    codes = harness.session_codes()
    return all(codes[name] == "trained" for name in sessions)


def test_a_row_that_does_not_fit_ends_its_group_and_the_others_are_trained(
    make_harness: MakeHarness, small_memory: None
) -> None:
    harness = make_harness(algorithm={"min_live_rows": 4, "max_tokens": 30}).start()
    harness.agents.group("healthy", [1.0, 0.0])
    for reward in (1.0, 0.0):
        long = {"output_ids": [10] * FITS, "logprobs": [-1.0] * FITS}
        harness.agents.episode(f"long-{reward}", reward, group_id="long", size=2, **long)
    harness.agents.group("later", [1.0, 0.0])
    used = list(processes(harness, lambda now: trained(now, "healthy-0", "later-0")))
    assert len(used) == 1 + 2 + 2, "the step ends the process twice, and so does the trial of the group"
    codes = harness.session_codes()
    assert (codes["long-1.0"], codes["long-0.0"]) == ("invalid", "invalid")
    verdict = harness.stream.heads["long-1.0"].verdict
    assert verdict is not None
    assert "computed this group's gradient alone" in verdict.detail


def test_micro_batches_that_do_not_fit_are_halved_for_the_run(
    make_harness: MakeHarness, small_memory: None
) -> None:
    bounds = {"min_live_rows": 16, "max_tokens": 2 * FITS}
    harness = make_harness(algorithm=bounds).start()
    for name in "abcdefgh":
        harness.agents.group(name, [1.0, 0.0])
    *_, last = processes(harness, lambda now: trained(now, "a-0", "h-0"))
    for name in "ijklmnop":
        last.agents.group(name, [1.0, 0.0])
    assert last.trainer.run_once()
    assert set(last.session_codes().values()) == {"trained"}


@pytest.mark.parametrize("reason", [Stopped, LeaseLost])
def test_a_process_that_ends_for_another_reason_raises_no_suspicion(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, reason: type[Exception]
) -> None:
    def ending(*_: Any) -> Any:
        raise reason

    harness = make_harness().start()
    harness.agents.group("g", [1.0, 0.0])
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(DeepSpeedPolicy, "scores", ending)
            with pytest.raises(reason):
                harness.trainer.run_once()
        harness = harness.restart()
    norms: list[object] = []
    monkeypatch.setattr(harness.policy, "gradient_norm", norms.append)  # a trial asks for it
    assert harness.trainer.run_once()
    assert not norms
