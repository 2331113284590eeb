"""Turns failures of files into the reasons why a version is not loaded."""

from collections.abc import Iterator
from contextlib import contextmanager

from rollout_server.errors import WeightsRefused, WeightsUnavailable
from rollout_server.weights.safetensors_file import BrokenWeights


@contextmanager
def as_reload_errors(version: int) -> Iterator[None]:
    """Raises WeightsRefused for broken files, and WeightsUnavailable if they cannot be read now."""
    try:
        yield
    except BrokenWeights as error:
        raise WeightsRefused(f"version {version}: {error}") from error
    except OSError as error:
        raise WeightsUnavailable(f"version {version}: {error}") from error
