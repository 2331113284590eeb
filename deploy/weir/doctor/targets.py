"""What `weir doctor` examines: addresses, the admin key, and the settings that are known on this machine."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollout_queue.settings import ServiceSettings
from weir.configuration import service_settings
from weir.doctor.deployment_facts import Settings
from weir.options import gateway_of, redis_of
from weir.stack import stack_state
from weir.stack.run_keys import NAMES
from weir.stack.settings import StackSettings, service_field
from weir.stack.stack_state import StackState

logger = logging.getLogger(__name__)
PATIENCE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Where the parts of a deployment are."""

    gateway_url: str
    redis_url: str
    trainer_url: str | None = None
    """Asked if the trainer has not reported its address."""
    admin_key: str | None = None
    server_key: str | None = None
    """The key of rollout servers; None: they take the admin key."""
    run_dir: Path | None = None
    """The directory of `weir up`; None if nothing was started there."""
    stack: StackState | None = None
    settings: Settings = field(default_factory=dict)
    patience_s: float = PATIENCE_S
    """How long one service may take for all that it is asked."""


def targets_of(
    settings: StackSettings,
    gateway_url: str | None = None,
    redis_url: str | None = None,
    patience_s: float = PATIENCE_S,
) -> Targets:
    """Each address comes from the arguments, or else as `weir.options` says."""
    found = stack_state.read(settings.run_dir)
    running = {} if found is None else found.urls
    return Targets(
        gateway_url=(gateway_url or gateway_of(settings, running)).rstrip("/"),
        redis_url=redis_url or redis_of(settings, running),
        trainer_url=running.get("trainer_service"),
        admin_key=next(iter(settings.admin_keys), None),
        server_key=settings.rollout_server_key,
        run_dir=settings.run_dir if found is not None else None,
        stack=found,
        settings=settings_known(None) if found is None else settings_of_up(settings),
        patience_s=patience_s,
    )


def settings_of_up(settings: StackSettings) -> Settings:
    """What `weir up` gives the services: the settings that it wrote, and the keys in their environment."""
    known = settings_known(settings.run_dir / "weir.yaml")
    given = {name: value for name in NAMES if (value := getattr(settings, name))}
    return {
        section: {**fields, **{name: value for name, value in given.items() if name in fields}}
        for section, fields in known.items()
    }


def settings_known(written: Path | None) -> Settings:
    """The settings that services have here: those that `weir up` wrote, with all defaults; else those that
    the environment and weir.yaml give, without defaults, since the services may run elsewhere."""
    known: dict[str, dict[str, Any]] = {}
    document: dict[str, Any] = {}
    if written is not None:
        try:
            document = yaml.safe_load(written.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            logger.warning("%s cannot be read: %s", written, error)
    for kind in service_settings():
        if document:
            known[kind.section] = _defaults(kind) | (document.get(kind.section) or {})
        else:
            names = [*kind.model_fields]
            given = {name: service_field(kind.section, name) for name in names}
            known[kind.section] = {name: value for name, value in given.items() if value is not None}
    return known


def _defaults(kind: type[ServiceSettings]) -> dict[str, Any]:
    return {
        name: each.default
        for name, each in kind.model_fields.items()
        if not each.is_required() and each.default_factory is None
    }
