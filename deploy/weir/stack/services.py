"""The services of one machine: their configuration, their environment, their commands.

weir.yaml of the user ─┐
addresses, directories ├─▶ {run_dir}/weir.yaml ─▶ every service reads its own section
StackSettings.services ┘
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollout_queue.config_file import CONFIG_VARIABLE, MalformedSettings, file_document
from rollout_queue.private_file import write_private
from rollout_queue.settings import SHORT_NAMES, read_settings
from weir.errors import StackError
from weir.stack.run_keys import variables
from weir.stack.service_process import Service, http_ready, redis_service
from weir.stack.settings import OWNERS, PYTHON, StackSettings, variable

Sections = dict[str, dict[str, Any]]


def services_of(settings: StackSettings) -> tuple[Service, ...]:
    """The services in the order of their start; they are stopped in the reverse order."""
    config_path = settings.run_dir.absolute() / "weir.yaml"
    write_private(config_path, yaml.safe_dump(effective_sections(settings), sort_keys=False))
    ours = determined_sections(settings)

    def service(module: str, section: str, *ports: str, ranks: int = 1) -> Service:
        numbers = [getattr(settings, name) for name in ports]
        url = f"http://127.0.0.1:{numbers[0]}"
        return Service(
            name=module,
            command=(PYTHON, *launcher(ranks), "-m", module),
            ports={number: setting_of(*OWNERS[name]) for number, name in zip(numbers, ports, strict=True)},
            url=url,
            ready=http_ready(url),
            environment=environment_of(section, ours[section], config_path, settings),
        )

    services = (
        redis_service(settings),
        service("rollout_server", "rollout_server", "rollout_port", "engine_port"),
        service("gateway", "gateway", "gateway_port"),
        service("trainer_service", "trainer", "trainer_port", ranks=settings.trainer_ranks),
    )
    if _has_reward_rules(settings):
        return (*services, service("reward_service", "rewards", "rewards_port"))
    return services


def _has_reward_rules(settings: StackSettings) -> bool:
    """Whether the section `rewards` has rules, so that the reward service is to run. Raises StackError for a
    malformed section."""
    from reward_service.settings import RewardSettings

    try:
        return bool(read_settings(RewardSettings, **settings.services.get("rewards", {})).rules)
    except MalformedSettings as error:
        raise StackError(str(error)) from error


def launcher(ranks: int) -> tuple[str, ...]:
    """The arguments that start several ranks, and end all of them when one ends; none for one rank."""
    if ranks == 1:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")


def determined_sections(settings: StackSettings) -> Sections:
    """The fields that the stack sets for each service; they win over weir.yaml and the environment."""
    run_dir, logs_dir = settings.run_dir.absolute(), settings.logs_dir.absolute()
    model_path = str(settings.model_path.absolute()) if settings.model_path else None
    gateway_url = f"http://127.0.0.1:{settings.gateway_port}"
    sections: Sections = {
        "gateway": {
            "port": settings.gateway_port,
            "redis_url": settings.redis_url,
            "model_path": model_path,
        },
        "rollout_server": {
            "id": settings.rollout_id,
            "port": settings.rollout_port,
            "engine_port": settings.engine_port,
            "engine_python": str(settings.engine_python.absolute()),
            "engine_log": str(logs_dir / "engine.log"),
            "gateway_url": gateway_url,
            "trainer_url": f"http://127.0.0.1:{settings.trainer_port}",
            "model_path": model_path,
            "policies_dir": str(run_dir / "policies"),
            "weights_dir": str(run_dir / "weights"),
        },
        "trainer": {
            "port": settings.trainer_port,
            "redis_url": settings.redis_url,
            "gateway_url": gateway_url,
            "model_path": model_path,
            "policies_dir": str(run_dir / "policies"),
            "checkpoint_dir": str(run_dir / "checkpoints"),
            "metrics_path": str(run_dir / "metrics.jsonl"),
        },
        "rewards": {"port": settings.rewards_port, "gateway_url": gateway_url},
    }
    return merged(sections, settings.services)


def effective_sections(settings: StackSettings) -> Sections:
    """The user's weir.yaml, overwritten by `determined_sections`. API keys are in it only if the user wrote
    them into weir.yaml; the keys in `settings` are passed in the environment."""
    return merged(file_document(), determined_sections(settings))


def environment_of(
    section: str, fields: Mapping[str, Any], config_path: Path, settings: StackSettings
) -> dict[str, str]:
    """The parent's environment, without variables that would override what the stack determines."""
    owned = {variable(section, name) for name in fields}
    owned |= {f"WEIR_{name}".upper() for name in fields if name in SHORT_NAMES}
    keys = variables(settings)
    owned |= {f"{name}_FILE" for name in keys}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in owned and not any(name.startswith(f"{prefix}__") for prefix in owned)
    }
    # DeepSpeed looks for ninja on PATH; it is beside the interpreter, even when no venv is activated.
    path = os.pathsep.join([str(Path(PYTHON).parent), os.environ.get("PATH", os.defpath)])
    return (
        environment
        | keys
        | {
            CONFIG_VARIABLE: str(config_path),
            "PATH": path,
            # Idle threads sleep instead of spinning, because they share a few cores with the engine.
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )


def setting_of(section: str, name: str) -> str:
    """A setting's name for messages: in weir.yaml, and in the environment."""
    return f"{section}.{name} ({variable(section, name)})"


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` and `over` merged field by field, at any depth; `over` wins."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[name] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result
