"""A whole stack beside others: ports, keys and a folder of its own."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.processes import free_port
from weir.stack.settings import StackSettings


def beside_others(
    run_dir: Path, model_path: Path, services: Mapping[str, Any], engine_port: int | None = None
) -> StackSettings:
    """`services` as sections of weir.yaml."""
    return StackSettings(
        run_dir=run_dir,
        model_path=model_path,
        redis_port=free_port(),
        gateway_port=free_port(),
        rollout_port=free_port(),
        engine_port=engine_port or free_port(),
        trainer_port=free_port(),
        client_keys=[secrets.token_urlsafe(16)],
        admin_keys=[secrets.token_urlsafe(16)],
        services=dict(services),
    )
