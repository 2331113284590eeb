"""The metrics of all workers as one text for Prometheus, each sample with the number of its worker."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """What Prometheus calls a metric family."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]
    """The name, the labels and the value of each sample."""


_families = msgspec.msgpack.Decoder(list[MetricFamily])


def exported(registry: CollectorRegistry) -> bytes:
    """The metrics of one worker, for `merged`."""
    return msgspec.msgpack.encode(
        [
            MetricFamily(
                family.name,
                family.documentation,
                family.type,
                [(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
            )
            for family in registry.collect()
        ]
    )


def merged(workers: Mapping[int, bytes | None]) -> bytes:
    """The text for Prometheus. `workers`: what `exported` returned, None for a worker that did not answer."""
    registry = CollectorRegistry()
    registry.register(_Merged(dict(sorted(workers.items()))))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, workers: Mapping[int, bytes | None]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        up = Metric("weir_worker_up", "1 for a worker that answered, 0 for one that did not", "gauge")
        families: dict[str, Metric] = {}
        for number, found in self._workers.items():
            up.add_sample("weir_worker_up", {"worker": str(number)}, float(found is not None))
            for family in _decoded(found):
                metric = families.setdefault(family.name, Metric(family.name, family.text, family.kind))
                for name, labels, value in family.samples:
                    metric.add_sample(name, {"worker": str(number), **labels}, value)
        yield up
        yield from families.values()


def _decoded(found: bytes | None) -> Sequence[MetricFamily]:
    return [] if found is None else _families.decode(found)
