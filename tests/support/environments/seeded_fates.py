"""The same in a module that seeds the process-wide generators when it is imported."""

import random

import numpy as np

from tests.support.environments.fates import Fates

__all__ = ["Fates"]

random.seed(1)
np.random.seed(1)
