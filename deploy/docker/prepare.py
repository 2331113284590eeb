"""Runs before the services of compose: writes weir.yaml and the keys, and makes the demo's model if the
variable WEIR_MODEL_DIR names no other.

WEIR_MODEL_DIR ─┬─ empty ─▶ /model/tool-…-seed0 is made once ─▶ its path and the demo's settings ─┐
                └─ named ─▶ /model is that directory ─────────▶ its path, and the defaults ───────┴▶ weir.yaml

WEIR_CLIENT_KEYS, WEIR_ADMIN_KEYS, or else new keys that are made and printed once ─▶ files that services read
"""

import os
import secrets
from pathlib import Path

import yaml

from rollout_queue.private_file import write_private
from weir.demo.make_model import model_for
from weir.demo.settings import services_of_demo
from weir.errors import StackError
from weir.stack.services import Sections, merged

MODEL_DIR = Path("/model")
CONFIG_PATH = Path("/etc/weir/weir.yaml")
SECRETS_DIR = Path("/run/weir")
"""What gateways, the trainer and Redis read."""
ENGINE_SECRETS_DIR = Path("/run/weir-engines")
"""What rollout servers read: their own key and that of engines."""
CLIENT_SECRETS_DIR, REWARDS_SECRETS_DIR = Path("/run/weir-clients"), Path("/run/weir-rewards")
"""What the demo's agent and the services of graders read: the client keys; the keys, and nothing of Redis."""
SEED = 0
UNKNOWN_KEYS = (
    "there was a deployment here whose keys are not known: "
    "agents with keys of an earlier start get 401, unless WEIR_CLIENT_KEYS names those"
)


def main() -> None:
    path: Path = MODEL_DIR
    settings: Sections = {}
    if not os.environ.get("WEIR_MODEL_DIR"):
        path, settings = demo()
    elif not (MODEL_DIR / "config.json").is_file():
        raise SystemExit(f"no config.json in {os.environ['WEIR_MODEL_DIR']}: WEIR_MODEL_DIR names no model")
    paths = {section: {"model_path": str(path)} for section in ("gateway", "rollout_server", "trainer")}
    write_keys()
    write_private(CONFIG_PATH, yaml.safe_dump(merged(paths, settings), sort_keys=False))
    print(f"{CONFIG_PATH}: {path}", flush=True)


def write_keys() -> None:
    """Write the keys of the environment. Those that it lacks are kept, or made and printed."""
    keys = {role: key_of(role) for role in ("client", "admin")}
    password = kept(SECRETS_DIR / "redis_password") or secrets.token_hex(32)
    write_private(SECRETS_DIR / "redis_password", password)
    write_private(SECRETS_DIR / "redis_password.conf", f"requirepass {password}\n")
    write_private(SECRETS_DIR / "redis_url", f"redis://:{password}@redis:6379/0")
    for name in ("rollout_server_key", "trainer_key", "engine_key"):
        value = kept(SECRETS_DIR / name) or secrets.token_urlsafe(32)
        write_private(SECRETS_DIR / name, value)
        if name != "trainer_key":
            write_private(ENGINE_SECRETS_DIR / name, value)
    for role, value in keys.items():
        write_private(SECRETS_DIR / f"{role}_keys", value)
        write_private(REWARDS_SECRETS_DIR / f"{role}_keys", value)
    write_private(CLIENT_SECRETS_DIR / "client_keys", keys["client"])


def key_of(role: str) -> str:
    """The keys of this role, as the services read them."""
    former = kept(SECRETS_DIR / f"{role}_keys")
    if value := os.environ.get(f"WEIR_{role.upper()}_KEYS") or former:
        if former and value != former:
            print(f"the {role} keys are others than at the last start: the former ones get 401", flush=True)
        return value
    if CONFIG_PATH.exists() and role == "client":
        print(UNKNOWN_KEYS, flush=True)
    made = f"weir-{role}-{secrets.token_urlsafe(24)}"
    print(f"a new {role} key: {made}", flush=True)
    return made


def kept(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def demo() -> tuple[Path, Sections]:
    try:
        path, _ = model_for(MODEL_DIR, SEED, lambda line: print(line, flush=True))
    except StackError as error:
        raise SystemExit(str(error)) from None
    return path, services_of_demo(SEED)


if __name__ == "__main__":
    main()
