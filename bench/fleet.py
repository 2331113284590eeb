"""A large fleet, simulated: what the choice of a server costs, how even the load is, what prefixes save.

python -m bench.fleet                  the table of servers, by their number and the choice
python -m bench.fleet events           a push, deaths, joins, a session with 1,000 forks
python -m bench.fleet concurrency      limits of calls against none, with more calls than the caches hold
python -m bench.fleet redis            what a turn costs Redis, with the gateways' writer on a real server
python -m bench.fleet push             a push of 15 GB to the fleet

`--share` makes the fleet of all but the last two smaller: 0.1 is a tenth of the servers and sessions.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.simulated_fleet import push
from bench.simulated_fleet.calls import (
    EVENTS,
    LeastLoadedRotation,
    MeasuredRotation,
    RandomRotation,
    SimulatedTraffic,
    Traffic,
    simulated_calls,
)
from bench.simulated_fleet.engines import EngineModel
from bench.simulated_fleet.redis_operations import redis_costs
from gateway.settings import ConcurrencySettings

KINDS = {"placement": MeasuredRotation, "random": RandomRotation, "least loaded": LeastLoadedRotation}
COLUMNS = (
    "servers",
    "choice",
    "turns/s",
    "CPU of a choice, µs, p50 / p99",
    "calls of a server, mean",
    "most / mean",
    "p99 / mean",
    "KV tokens, most / mean",
    "turns on their prefix",
    "prompt tokens cached",
    "answer after, s",
    "polls/s",
)
EVENT_COLUMNS = (
    "event",
    "turns",
    "failed",
    "retried",
    "slowest 1 %, s",
    "most / mean",
    "turns on their prefix",
    "placed",
)
LIMIT_COLUMNS = (
    "limits",
    "turns/s",
    "retractions",
    "prefill tokens / prompt token",
    "mean, s",
    "p99, s",
    "failed",
)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for cells in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(cells)} |", flush=True)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def unevenness(samples: Sequence[Sequence[float]], share: float) -> float:
    """The mean over the samples of their quantile over their mean."""
    found = [quantile(sample, share) * len(sample) / sum(sample) for sample in samples if sum(sample)]
    return sum(found) / len(found) if found else float("nan")


def servers_row(name: str, run: SimulatedTraffic) -> Sequence[str]:
    seen, traffic = run.seen, run.traffic
    engines = run.engines.values()
    prompted = sum(engine.seen.prompted for engine in engines)
    decision = [each / 1000 for each in seen.decisions_ns]
    calls = [each for sample in seen.running for each in sample]
    return (
        f"{traffic.servers:,}",
        name,
        f"{seen.turns / traffic.measured_s:,.0f}",
        f"{quantile(decision, 0.5):.0f} / {quantile(decision, 0.99):.0f}" if decision else "",
        f"{sum(calls) / len(calls):.0f}",
        f"{unevenness(seen.running, 1.0):.2f}",
        f"{unevenness(seen.running, 0.99):.2f}",
        f"{unevenness(seen.held, 1.0):.2f}",
        f"{seen.on_prefix / max(1, seen.later_turns):.1%}",
        f"{sum(engine.seen.cached for engine in engines) / max(1, prompted):.0%}",
        f"{sum(seen.seconds) / len(seen.seconds):.1f}",
        f"{run.status.polls / traffic.measured_s:,.0f}",
    )


def fleet_of(servers: int, **others: Any) -> Traffic:
    gateways = max(1, min(10, servers // 10))
    return replace(Traffic(), servers=servers, sessions=100 * servers, gateways=gateways, **others)


def event_row(name: str, run: SimulatedTraffic) -> Sequence[str]:
    seen = run.seen
    placed: Counter[str] = Counter()
    for fleet in run.fleets:
        placed.update(fleet.rotation.placed)
    elsewhere = ", ".join(f"{reason} {count:,}" for reason, count in placed.most_common())
    return (
        name,
        f"{seen.turns:,}",
        f"{seen.failed:,}",
        f"{seen.retried:,}",
        f"{quantile(seen.seconds, 0.99):.1f}",
        f"{max(unevenness([sample], 1.0) for sample in seen.running):.2f}",
        f"{seen.on_prefix / max(1, seen.later_turns):.1%}",
        elsewhere,
    )


def limit_row(name: str, run: SimulatedTraffic) -> Sequence[str]:
    seen, engines = run.seen, run.engines.values()
    prompted = sum(engine.seen.prompted for engine in engines)
    return (
        name,
        f"{seen.turns / run.traffic.measured_s:,.1f}",
        f"{sum(engine.seen.retractions for engine in engines):,}",
        f"{sum(engine.seen.prefilled for engine in engines) / max(1, prompted):.2f}",
        f"{sum(seen.seconds) / max(1, len(seen.seconds)):.1f}",
        f"{quantile(seen.seconds, 0.99):.1f}",
        f"{seen.failed:,}",
    )


CROWDED = Traffic(
    servers=4,
    gateways=2,
    sessions=1000,
    first_prompt=4000,
    output=700,
    most_output=4096,
    warm_s=60.0,
    measured_s=120.0,
    wait_s=120.0,
    engine=EngineModel(kv_tokens=400_000, max_running=512),
)
"""More sessions than the caches hold: 250 a server, with about 8,000 tokens each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    choices = ("servers", "events", "concurrency", "redis", "push")
    parser.add_argument("what", nargs="?", default="servers", choices=choices)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--servers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--choices", nargs="+", default=list(KINDS), choices=KINDS)
    asked = parser.parse_args()
    match asked.what:
        case "push":
            push.main()
        case "redis":
            table(
                (
                    "gateways",
                    "commands",
                    "bytes to Redis",
                    "bytes from Redis",
                    "CPU of Redis, µs",
                ),
                [redis_costs(gateways).cells for gateways in (1, 10)],
            )
        case "concurrency":
            limits = {"none": ConcurrencySettings(adaptive=False), "adaptive": ConcurrencySettings()}
            runs = {
                name: simulated_calls(replace(CROWDED, concurrency=each)) for name, each in limits.items()
            }
            table(LIMIT_COLUMNS, [limit_row(name, run) for name, run in runs.items()])
        case "events":
            fleet = fleet_of(int(1000 * asked.share), measured_s=30.0)
            found = {name: simulated_calls(fleet, events=events) for name, events in EVENTS.items()}
            table(EVENT_COLUMNS, [event_row(name, run) for name, run in found.items()])
        case _:
            sizes = [max(10, int(each * asked.share)) for each in asked.servers]
            rows = [
                servers_row(name, simulated_calls(fleet_of(size), KINDS[name]))
                for size in dict.fromkeys(sizes)
                for name in asked.choices
            ]
            table(COLUMNS, rows)


if __name__ == "__main__":
    main()
