"""The limits of calls that follow the load of engines: properties of the arithmetic, and the settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.engines.placement.concurrency import EngineLoad, next_limit
from gateway.settings.groups import ConcurrencySettings

SETTINGS = ConcurrencySettings(first=32, least=4, most=512)
COUNTS = st.integers(0, 2000)
LOADS = st.builds(EngineLoad, running=COUNTS, waiting=COUNTS, kv_usage=st.floats(0, 1))
LIMITS = st.none() | st.integers(SETTINGS.least, SETTINGS.most)


@given(LIMITS, LOADS)
def test_a_limit_stays_within_its_bounds(limit: int | None, load: EngineLoad) -> None:
    found = next_limit(limit, load, SETTINGS)
    assert found is not None
    assert SETTINGS.least <= found <= SETTINGS.most


@given(st.integers(SETTINGS.least, SETTINGS.most), LOADS)
def test_a_limit_never_grows_while_calls_wait_or_the_cache_is_full(limit: int, load: EngineLoad) -> None:
    found = next_limit(limit, load, SETTINGS)
    assert found is not None
    if load.waiting or load.kv_usage is None or load.kv_usage >= SETTINGS.kv_target:
        assert found <= limit
    else:
        assert limit <= found <= 2 * limit


@given(st.integers(SETTINGS.least, SETTINGS.most), LOADS)
def test_a_limit_is_cut_once_for_one_overload(limit: int, load: EngineLoad) -> None:
    """While the engine has more calls than the limit, the last cut is still having its effect."""
    if load.calls > limit:
        found = next_limit(limit, load, SETTINGS)
        assert found is not None
        assert found >= limit


@given(LIMITS, COUNTS, COUNTS)
def test_engines_that_report_no_cache_have_no_limit(limit: int | None, running: int, waiting: int) -> None:
    assert next_limit(limit, EngineLoad(running, waiting), SETTINGS) is None
    full = EngineLoad(running, waiting, 1.0)
    assert next_limit(limit, full, ConcurrencySettings(adaptive=False)) is None


@given(st.floats(0.001, 0.05))
def test_a_limit_settles_where_the_cache_is_as_full_as_wanted(share: float) -> None:
    """Each call takes the same share of the cache, and there are always enough calls."""
    limit: int | None = None
    for _ in range(60):
        running = 8 if limit is None else limit
        limit = next_limit(limit, EngineLoad(running, 0, min(1.0, running * share)), SETTINGS)
    assert limit is not None
    wanted = SETTINGS.kv_target / share
    most = SETTINGS.kv_high / share
    assert min(wanted - 1, SETTINGS.most) - 1 <= limit <= max(most, SETTINGS.least)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="least"):
        ConcurrencySettings(least=9, most=8)
    with pytest.raises(ValidationError, match="kv_target"):
        ConcurrencySettings(kv_target=0.95)
