"""Runs the reward service until SIGTERM: python -m reward_service [--config weir.yaml]."""

import asyncio

from reward_service.app import check_rules, create_app
from reward_service.graders.grade import UnusableSource
from reward_service.python_sandbox import hide_from_children, isolates
from reward_service.settings import RewardSettings
from rollout_queue.http.bounded_protocol import ConnectionBounds
from rollout_queue.http.callers import Keyring
from rollout_queue.starting import Serving, one_sentence, serve_main

LAST_ANSWERS_S = 10.0
"""How long requests may still take after SIGTERM."""
CONNECTIONS = 256
"""Each may hold one body in memory."""


def main() -> None:
    serve_main("reward_service", "Rewards sessions that have ended.", RewardSettings, _keys, _build)


def _keys(settings: RewardSettings) -> Keyring:
    return Keyring(settings.client_keys, settings.admin_keys)


def _build(settings: RewardSettings, _keyring: Keyring) -> Serving:
    isolated = isolates(settings.python, "rewards")
    hide_from_children()
    bounds = ConnectionBounds(in_all=CONNECTIONS, per_address=CONNECTIONS)
    with one_sentence("rewards.rules", OSError, ValueError):
        app = create_app(settings, isolated=isolated)
    with one_sentence("", OSError, ValueError, UnusableSource):
        asyncio.run(check_rules(settings, isolated=isolated))
    return Serving(app, LAST_ANSWERS_S, bounds=bounds, loop="asyncio")


if __name__ == "__main__":
    main()
