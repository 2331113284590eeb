"""How many examples property tests draw: few by default, many with `pytest --hypothesis-profile long`."""

import os

from hypothesis import HealthCheck, settings

QUICK, LONG = "weir", "long"
QUICK_EXAMPLES = 30
LONG_EXAMPLES = int(os.environ.get("WEIR_TEST_EXAMPLES", "1000"))


def register() -> None:
    """Register the profiles. Call this before test modules are imported, so that pytest's option works."""
    # A slow draw shows that the machine is busy; it is no fault of the tested code.
    suppressed = [HealthCheck.too_slow]
    settings.register_profile(
        QUICK, max_examples=QUICK_EXAMPLES, deadline=None, suppress_health_check=suppressed
    )
    settings.register_profile(LONG, settings.get_profile(QUICK), max_examples=LONG_EXAMPLES)
    settings.load_profile(QUICK)


def long() -> bool:
    return settings.get_current_profile_name() == LONG


def examples(share: int) -> int:
    """How many examples a test draws; `share` is in percent of what a test draws by default."""
    return max(1, share * (LONG_EXAMPLES if long() else QUICK_EXAMPLES) // 100)
