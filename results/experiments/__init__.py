"""The experiments by name. Each module says what is asked, and how the first model is made."""

from collections.abc import Mapping

from results.experiment import Experiment
from results.experiments.colours import COLOURS
from results.experiments.countdown import COUNTDOWN
from results.experiments.errands import ERRANDS
from results.experiments.nim import NIM
from results.experiments.reasoning import CHAIN_SUM, COUNT_BITS
from results.experiments.smollm2 import EXTRACTION, GCD, LOOKUP

EXPERIMENTS: Mapping[str, Experiment] = {
    each.name: each
    for each in (COUNTDOWN, CHAIN_SUM, COUNT_BITS, NIM, ERRANDS, COLOURS, EXTRACTION, LOOKUP, GCD)
}
