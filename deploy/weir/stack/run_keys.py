"""The keys of a run, and the password of its Redis. No service of `weir up` is without a key.

configuration (WEIR_ADMIN_KEYS, gateway.admin_keys, …) ─┐
{run_dir}/keys/admin_keys, which an earlier start left ─┼─ the first ─▶ services, {run_dir}/keys/admin_keys
a new random key ───────────────────────────────────────┘

A file has one key a line, as one that WEIR_ADMIN_KEYS_FILE names.
"""

import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollout_queue.config_file import file_document
from rollout_queue.http.callers import LOOPBACK
from rollout_queue.private_file import write_private
from rollout_queue.settings import SHORT_NAMES
from weir.errors import StackError
from weir.stack import stack_state
from weir.stack.settings import StackSettings, service_field, variable

ROLES = {"client_keys": "weir-client-", "admin_keys": "weir-admin-"}
"""The keys of people and agents, and what a new one begins with."""
OF_SERVICES = ("rollout_server_key", "trainer_key")
"""The keys of services. Without them, services call each other with the first admin key."""
SECTIONS = ("gateway", "trainer", "rollout_server", "rewards", "fine_tuning")
NAMES = (*ROLES, *OF_SERVICES, "engine_key", "redis_password")


def with_keys(settings: StackSettings) -> StackSettings:
    """The settings with all keys, which are written into the run directory. Where an operator has set admin
    keys and no keys of services, these stay unset, because services elsewhere may know the former only.
    Raises StackError."""
    directory = directory_of(settings.run_dir)
    for each in (settings.run_dir, directory):
        stack_state.own_run_dir(each)
    operated = configured(settings, "admin_keys")
    found: dict[str, Any] = {}
    for name in NAMES:
        found[name] = configured(settings, name)
        if not found[name] and not (operated and name in OF_SERVICES):
            found[name] = kept(directory, name) or _new(name)
        if found[name]:
            write_private(directory / name, _text(found[name]) + "\n")
        else:
            (directory / name).unlink(missing_ok=True)
    return settings.model_copy(update=found)


def of_run(settings: StackSettings, gateway_url: str | None = None) -> StackSettings:
    """The settings with the keys of the services that run in the run directory, where the configuration has
    none. Another gateway than theirs does not get them."""
    found = stack_state.read(settings.run_dir)
    if found is None or (gateway_url is not None and not _is_same(gateway_url, found.gateway_url)):
        return settings
    directory = directory_of(settings.run_dir)
    given = {name: configured(settings, name) or kept(directory, name) for name in NAMES}
    return settings.model_copy(update={name: value for name, value in given.items() if value})


def configured(settings: StackSettings, name: str) -> Any:
    """What the operator has set for the stack, or else for any service; empty or None if nothing. Raises
    StackError."""
    if value := getattr(settings, name):
        return value
    if name == "redis_password":
        return _password_of_services()
    for section in SECTIONS:
        own, written = settings.services.get(section, {}), file_document().get(section, {})
        if value := own.get(name) or os.environ.get(variable(section, name)) or written.get(name):
            return value.split(",") if name in ROLES and isinstance(value, str) else value
    return None


def _password_of_services() -> str | None:
    """The password that the services would present, whatever the URL of Redis says. Raises StackError."""
    path = service_field("trainer", "redis_password_file")
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StackError(f"redis_password_file: {path} cannot be read: {error.strerror}") from error


def kept(directory: Path, name: str) -> Any:
    """The keys of this name in the directory; empty or None if there are none."""
    try:
        lines = list(filter(None, (directory / name).read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        lines = []
    return lines if name in ROLES else next(iter(lines), None)


def variables(settings: StackSettings) -> dict[str, str]:
    """The keys in the variables from which services read them."""
    given = {name: getattr(settings, name) for name in NAMES if name in SHORT_NAMES}
    return {f"WEIR_{name}".upper(): _text(value).replace("\n", ",") for name, value in given.items() if value}


def directory_of(run_dir: Path) -> Path:
    return run_dir / "keys"


def _is_same(url: str, own: str | None) -> bool:
    """Whether `url` is the address of our own service, which is on loopback."""
    parts, ours = urlsplit(url), urlsplit(own or "")
    return parts.hostname in LOOPBACK and parts.port == ours.port


def _new(name: str) -> Any:
    made = ROLES.get(name, "") + secrets.token_urlsafe(24)
    return [made] if name in ROLES else made


def _text(value: list[str] | str) -> str:
    return value if isinstance(value, str) else "\n".join(value)
