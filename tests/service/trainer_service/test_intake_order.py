"""More groups arrive than steps take: which are trained, which wait, and which are skipped at once."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from rollout_queue.contract.policies.trained_step import TrainedStep
from rollout_queue.contract.records import Span
from rollout_queue.contract.stream import Verdicts
from rollout_queue.memory import MemoryStream
from tests.support.hypothesis_profiles import examples
from tests.support.trainer_service.harness import Agents, Harness, MakeHarness
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.intake.intake import Intake
from trainer_service.metrics import TrainerMetrics
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.shared_state import SharedState

ONE_PAIR = {"min_live_rows": 2, "max_rows": 2}
"""A step takes one group of two."""


def arrive(harness: Harness, *names: str, at: float) -> None:
    """A group of two for each name, the later one a second younger."""
    for place, name in enumerate(names):
        versions = (Span(harness.trainer.version, 0, 3),)
        harness.agents.group(name, [1.0, 0.0], versions=versions, at=at + place)


def groups(harness: Harness, code: str | None) -> list[str]:
    codes = harness.session_codes()
    return sorted({name.rpartition("-")[0] for name, found in codes.items() if found == code})


@pytest.mark.parametrize("bound", [2, 4, 6])
def test_at_twice_the_capacity_a_bound_limits_what_waits_and_how_old_it_gets(
    make_harness: MakeHarness, bound: int
) -> None:
    algorithm = {"intake": "bounded", "max_waiting_groups": bound, **ONE_PAIR}
    harness = make_harness(algorithm=algorithm).start()
    ages = []
    for number in range(12):
        arrive(harness, f"{number:02}a", f"{number:02}b", at=100.0 + 2 * number)
        assert harness.trainer.run_once()
        ages.append(harness.shared_state.snapshot.metrics["staleness/total_max"])
        assert len(groups(harness, None)) <= bound
    # Two groups arrive with every step, so after `bound / 2` steps `bound` newer groups wait.
    assert max(ages) == bound / 2 - 1
    assert Counter(harness.session_codes().values())["trained"] == 2 * 12
    lost = groups(harness, "skipped_for_newer")
    assert len(lost) == 2 * 12 - 12 - len(groups(harness, None))
    verdict = harness.stream.heads[f"{lost[0]}-0"].verdict
    assert verdict is not None
    assert verdict.detail.startswith(
        f"{bound} newer groups wait, and no more may (max_waiting_groups): sampled"
    )
    assert len(list(harness.stream.reclaim())) <= 3 * 2 * bound, "three entries of each waiting session"


def test_a_bound_that_is_smaller_than_a_step_does_not_prevent_the_step(make_harness: MakeHarness) -> None:
    algorithm = {"intake": "bounded", "max_waiting_groups": 1, "min_live_rows": 6, "max_rows": 6}
    harness = make_harness(algorithm=algorithm).start()
    arrive(harness, "a", "b", at=100.0)
    assert not harness.trainer.run_once()
    assert groups(harness, None) == ["a", "b"]
    arrive(harness, "c", "d", "e", at=110.0)
    assert harness.trainer.run_once()
    assert (groups(harness, "trained"), groups(harness, "skipped_for_newer")) == (["c", "d", "e"], ["a", "b"])


def test_a_replay_share_takes_the_oldest_groups_beside_the_newest(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"replay_share": 0.5, "min_live_rows": 4, "max_rows": 4}).start()
    arrive(harness, "a", "b", "c", "d", "e", "f", at=100.0)
    assert harness.trainer.run_once()
    assert groups(harness, "trained") == ["a", "f"]
    assert harness.trainer.run_once()
    assert groups(harness, "trained") == ["a", "b", "e", "f"]


@pytest.mark.parametrize("intake", ["oldest", "bounded"])
def test_a_replay_share_is_refused_where_the_oldest_come_first_anyway(intake: str) -> None:
    with pytest.raises(ValueError, match=f"replay_share: intake {intake} takes the oldest groups anyway"):
        AlgorithmSettings.model_validate({"intake": intake, "replay_share": 0.5})


class CountingStream(MemoryStream):
    """Counts the verdicts that each session gets."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Counter[str]()

    def acknowledge(self, entry_ids: Any, verdicts: Verdicts) -> None:
        self.given.update(list(verdicts.sessions))
        super().acknowledge(entry_ids, verdicts)


CHOICES = st.one_of(
    st.builds(lambda share: {"intake": "newest", "replay_share": share}, st.sampled_from([0.0, 0.3, 0.9])),
    st.just({"intake": "oldest"}),
    st.builds(lambda bound: {"intake": "bounded", "max_waiting_groups": bound}, st.integers(1, 9)),
)


@given(
    CHOICES,
    st.fixed_dictionaries(
        {"curriculum": st.sampled_from([None, {"memory": 1}]), "over_sampling": st.sampled_from([0.0, 0.4])}
    ),
    st.lists(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=6), min_size=1, max_size=8),
    st.integers(1, 6),
)
@settings(max_examples=examples(40))
def test_every_session_waits_or_has_exactly_one_verdict(
    choice: dict[str, Any],
    more: dict[str, Any],
    arrivals: list[list[tuple[int, bool]]],
    rows: int,
) -> None:
    """Each round some groups arrive, of one to three sessions whose rewards differ or not; then comes a step
    if there is one."""
    algorithm = AlgorithmSettings.model_validate(
        {
            "min_live_rows": rows,
            "max_rows": rows,
            "max_staleness": 2,
            "group_wait_s": 1e12,
            **choice,
            **more,
        }
    )
    stream = CountingStream()
    intake = Intake(
        stream, algorithm, 64, Heartbeat(stream, SharedState(), 0.01), TrainerMetrics(CollectorRegistry())
    )
    agents, trained, opened = Agents(stream), list[str](), 0
    version, early = 0, list[str]()
    for number, arriving in enumerate(arrivals):
        for place, (size, differ) in enumerate(arriving):
            values = [float(differ and index == 0) for index in range(size)]
            agents.group(
                f"{number}.{place}",
                values,
                version=version,
                at=100.0 + 10 * number + place,
                task_id=str(size),
            )
            opened += size
        intake.read()
        batch = intake.select(version, algorithm, early)
        selected = [each.group.group_id for each in batch.groups]
        assert set(early) <= set(selected), "groups that are learned early stay in their step"
        early = [] if batch.full else selected
        if batch.full:
            version += 1
            trained += sessions(batch.groups)
            made = [row for group in batch.groups for row in group.rows]
            intake.mark_trained(batch.groups, made, TrainedStep(version, version, version - 1, 0, 0, 0))
    intake.run_state(version, version)  # a checkpoint
    intake.acknowledge()
    assert len(trained) == len(set(trained)), "no session is trained twice"
    assert max(stream.given.values(), default=1) == 1, "no session has two verdicts"
    assert intake.backlog.waiting + len(stream.given) == opened, "no session is lost"


def sessions(groups: list[ScreenedGroup]) -> list[str]:
    return [row.session_id for group in groups for row in group.planned]
