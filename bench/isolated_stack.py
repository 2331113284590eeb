"""The settings of a whole stack with its own ports, keys and folder, so that it can run beside others."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.processes import free_port
from weir.stack.settings import StackSettings


def isolated_stack(
    run_dir: Path, model_path: Path, services: Mapping[str, Any], engine_port: int | None = None
) -> StackSettings:
    """`services` are sections of weir.yaml."""
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
