"""Sums values over the tokens or rows of a step's parts. The metrics of the step are computed from the sums.

values of a micro-batch ─▶ Sums ─┬─ joined ─▶ totals, means, variances, largest values of the step
values of another one ───▶ Sums ─┘

So ranks exchange some numbers, and not the values of every token.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """What is known of several sets of values, by the name of the set. It is computed in float64."""

    totals: Mapping[str, float]
    counts: Mapping[str, int]
    """How many values each total has."""
    largest: Mapping[str, float]
    deviations: Mapping[str, float]
    """The sum of squared differences from the mean."""
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors on the CPU that are added up element by element."""

    @classmethod
    def of(
        cls,
        summed: Mapping[str, Tensor],
        largest: Mapping[str, Tensor] | None = None,
        spread: Mapping[str, Tensor] | None = None,
        vectors: Mapping[str, Tensor] | None = None,
    ) -> "Sums":
        """Of sets that have at least one value each. `spread` are sets that also have deviations. `vectors`
        are sums already."""
        every = {**summed, **(spread or {})}
        return cls(
            _numbers({name: values.double().sum() for name, values in every.items()}),
            {name: values.numel() for name, values in every.items()},
            _numbers({name: values.double().max() for name, values in (largest or {}).items()}),
            _numbers({name: _deviation(values.double()) for name, values in (spread or {}).items()}),
            {name: values.double().cpu() for name, values in (vectors or {}).items()},
        )

    @classmethod
    def joined(cls, parts: Iterable["Sums"]) -> "Sums":
        """Of all values of the parts. Deviations are joined as by Chan et al. 1979, "Updating formulae and a
        pairwise algorithm for computing sample variances"."""
        some = list(parts)
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        largest: dict[str, float] = {}
        deviations: dict[str, float] = {}
        vectors: dict[str, list[Tensor]] = {}
        for part in some:
            for name, total in part.totals.items():
                totals[name] = totals.get(name, 0) + total
                counts[name] = counts.get(name, 0) + part.counts[name]
            for name, value in part.largest.items():
                largest[name] = max(largest.get(name, value), value)
            for name, vector in part.vectors.items():
                vectors.setdefault(name, []).append(vector)
        for part in some:
            for name, deviation in part.deviations.items():
                distance = part.mean(name) - totals[name] / counts[name]
                deviation += part.counts[name] * distance**2
                deviations[name] = deviations.get(name, 0) + deviation
        summed = {name: torch.stack(each).sum(0) for name, each in vectors.items()}
        return cls(totals, counts, largest, deviations, summed)

    def mean(self, name: str) -> float:
        return self.totals[name] / self.counts[name]

    def variance(self, name: str) -> float:
        """The mean squared difference from the mean."""
        return self.deviations[name] / self.counts[name]


def _deviation(values: Tensor) -> Tensor:
    return (values - values.mean()).square().sum()


def _numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """One transfer from the device for all."""
    return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True)) if scalars else {}
