"""Runs the reward service until SIGTERM: python -m reward_service [--config weir.yaml]."""

import asyncio

from reward_service.app import check_rules, create_app
from reward_service.graders.grade import UnusableSource
from reward_service.python_sandbox import hide_from_children, isolates
from reward_service.settings import RewardSettings
from rollout_queue.http.bounded_protocol import ConnectionBounds
from rollout_queue.http.callers import Keyring, refuse_open_binding
from rollout_queue.http.http_server import serve
from rollout_queue.starting import start

LAST_ANSWERS_S = 10.0
"""How long requests may still take after SIGTERM."""
CONNECTIONS = 256
"""Each may hold one body in memory."""


def main() -> None:
    settings = start("reward_service", "Rewards sessions that have ended.", RewardSettings)
    refuse_open_binding(settings.host, Keyring(settings.client_keys, settings.admin_keys))
    isolated = isolates(settings.python, "rewards")
    hide_from_children()
    bounds = ConnectionBounds(in_all=CONNECTIONS, per_address=CONNECTIONS)
    try:
        app = create_app(settings, isolated=isolated)
    except (OSError, ValueError) as error:
        raise SystemExit(f"rewards.rules: {error}") from error
    try:
        asyncio.run(check_rules(settings, isolated=isolated))
    except (OSError, ValueError, UnusableSource) as error:
        raise SystemExit(str(error)) from error
    serve(
        app,
        settings.host,
        settings.port,
        LAST_ANSWERS_S,
        bounds=bounds,
        loop="asyncio",
        access_log=settings.access_log,
    )


if __name__ == "__main__":
    main()
