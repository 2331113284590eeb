"""The demo's ports, model and training settings: for the demos, and for `weir up` without a model."""

from collections.abc import Callable
from typing import Any

from weir.demo.make_model import model_for
from weir.stack.services import merged
from weir.stack.settings import StackSettings

DEMO_PORTS = {
    "gateway_port": 8010,
    "rollout_port": 8110,
    "engine_port": 30010,
    "trainer_port": 8210,
    "rewards_port": 8310,
    "redis_port": 6390,
}
"""The ports of the demos differ from those of `weir up`, so that both can run."""


def on_own_ports(settings: StackSettings) -> StackSettings:
    """The settings with the demo's ports, where the user has set none."""
    own = {name: port for name, port in DEMO_PORTS.items() if name not in settings.model_fields_set}
    return settings.model_copy(update=own)


def with_demo_model(
    settings: StackSettings, seed: int, on_progress: Callable[[str], None]
) -> tuple[StackSettings, bool]:
    """The settings with the demo's model and training settings, and whether this call made the model.

    A model in the cache is used again. Settings that the user gave win over the demo's.
    """
    model_path, made = model_for(settings.models_dir, seed, on_progress)
    services = merged(services_of_demo(seed), settings.services)
    return settings.model_copy(update={"model_path": model_path, "services": services}), made


def services_of_demo(seed: int) -> dict[str, dict[str, Any]]:
    """Settings with which a tiny model learns fast: small batches and a high learning rate."""
    return {
        "rollout_server": {"max_running_requests": 64, "max_total_tokens": 65536, "random_seed": seed},
        "trainer": {
            "seed": seed,
            "threads": 1,
            "optimizer": {"lr": 4e-4, "warmup_steps": 3},
            "algorithm": {"min_live_rows": 32, "max_rows": 96, "max_tokens": 1024},
        },
    }
