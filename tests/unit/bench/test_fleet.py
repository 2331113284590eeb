"""The simulation of a large fleet, made small: what must be true of any run."""

import asyncio
from dataclasses import replace

import pytest

from bench.simulated_fleet.calls import (
    EVENTS,
    LeastLoadedRotation,
    MeasuredRotation,
    RandomRotation,
    SimulatedTraffic,
    Traffic,
    simulated_calls,
)
from bench.simulated_fleet.engines import EngineCall, EngineModel, SimulatedEngine
from bench.simulated_fleet.virtual_time import virtual_clocks
from gateway.settings import ConcurrencySettings

SMALL = Traffic(servers=20, gateways=2, sessions=200, warm_s=12.0, measured_s=6.0)


def checked(run: SimulatedTraffic) -> SimulatedTraffic:
    """No call has failed, and every engine's tokens add up."""
    assert run.seen.failed == 0
    assert run.seen.turns > 0
    for engine in run.engines.values():
        assert engine.held == sum(call.held for call in engine.running)
        assert engine.held <= engine.model.kv_tokens
        assert engine.seen.cached + engine.seen.prefilled >= 0
    return run


def test_placement_keeps_conversations_on_their_prefixes_and_others_do_not() -> None:
    runs = {kind: checked(simulated_calls(SMALL, kind)) for kind in (MeasuredRotation, RandomRotation)}
    runs[LeastLoadedRotation] = checked(simulated_calls(SMALL, LeastLoadedRotation))
    shares = {kind: run.seen.on_prefix / run.seen.later_turns for kind, run in runs.items()}
    assert shares[MeasuredRotation] > 0.9
    assert max(shares[RandomRotation], shares[LeastLoadedRotation]) < 0.3
    prefilled = {kind: sum(e.seen.prefilled for e in run.engines.values()) for kind, run in runs.items()}
    assert prefilled[MeasuredRotation] < prefilled[RandomRotation] / 2
    first, second = runs[MeasuredRotation].seen, simulated_calls(SMALL, MeasuredRotation).seen
    assert (first.turns, first.seconds, first.running) == (second.turns, second.seconds, second.running), (
        "two runs with one seed are equal"
    )


@pytest.mark.parametrize("name", [name for name in EVENTS if name != "none"])
def test_no_call_fails_whatever_happens_to_the_fleet(name: str) -> None:
    run = checked(simulated_calls(replace(SMALL, measured_s=18.0), events=EVENTS[name]))
    if name == "a push":
        assert {engine.version for engine in run.engines.values()} == {2}
    if name == "a tenth dies":
        assert run.seen.retried > 0


def test_limits_keep_engines_from_retracting() -> None:
    crowded = replace(
        SMALL,
        servers=2,
        sessions=120,
        output=600,
        most_output=2048,
        wait_s=600.0,
        engine=EngineModel(kv_tokens=60_000, expected_share=0.1),
    )
    free = checked(simulated_calls(crowded))
    limited = checked(simulated_calls(replace(crowded, concurrency=ConcurrencySettings(first=8))))
    retractions = [sum(e.seen.retractions for e in run.engines.values()) for run in (free, limited)]
    assert retractions[1] < retractions[0] / 2


def test_an_engine_retracts_its_newest_call_and_answers_all() -> None:
    with virtual_clocks() as loop:

        async def serve() -> SimulatedEngine:
            engine = SimulatedEngine("r0", EngineModel(kv_tokens=2000, expected_share=0.0))
            calls = [EngineCall(str(n), 800, 600, 600, loop.create_future()) for n in range(2)]
            await asyncio.gather(*map(engine.serve, calls))
            return engine

        engine = loop.run_until_complete(serve())
    assert engine.seen.retractions > 0
    assert engine.seen.sampled == 1200
    assert engine.held == 0
    assert engine.seen.prefilled == 800 * (2 + engine.seen.retractions)
