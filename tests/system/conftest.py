"""The whole system, started once for all tests: Redis, SGLang, gateway, DeepSpeed, a tiny random model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import free_port
from tests.support.system.real_system import ADMIN_KEY, CLIENT_KEY, ENGINE_PYTHON, System
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the demo first. It starts its own engine, and two at once are too many for a small machine."""
    items.sort(key=lambda item: item.path.name != "test_demo.py" or item.path.parent.name != "system")


@pytest.fixture(scope="session")
def system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = StackSettings(
        run_dir=tmp_path_factory.mktemp("system"),
        model_path=tiny_model,
        redis_port=free_port(),
        gateway_port=free_port(),
        rollout_port=free_port(),
        engine_port=free_port(),
        trainer_port=free_port(),
        engine_python=ENGINE_PYTHON,
        client_keys=[CLIENT_KEY],
        admin_keys=[ADMIN_KEY],
        services={
            "gateway": {"engine_wait_s": 300},
            "rollout_server": {"max_running_requests": 16, "max_total_tokens": 32768},
            "trainer": {
                "threads": 1,
                "optimizer": {"lr": 1e-3},
                "algorithm": {"min_live_rows": 4, "max_tokens": 4096},
            },
        },
    )
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=300)
        yield System(stack, settings)
