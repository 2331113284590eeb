"""Runs the service for fine-tuning jobs until SIGTERM: python -m fine_tuning [--config weir.yaml]."""

from fine_tuning.app import create_app
from fine_tuning.errors import DirectoryInUse
from fine_tuning.settings import FineTuningSettings
from reward_service.python_sandbox import hide_from_children, isolates
from rollout_queue.http.bounded_protocol import ConnectionBounds
from rollout_queue.http.callers import Keyring
from rollout_queue.starting import Serving, one_sentence, serve_main

LAST_ANSWERS_S = 10.0
"""How long requests may still take after SIGTERM."""
CONNECTIONS = 16
"""Each may hold one upload in memory."""


def main() -> None:
    serve_main("fine_tuning", "Fine-tuning jobs in OpenAI's form.", FineTuningSettings, _keys, _build)


def _keys(settings: FineTuningSettings) -> Keyring:
    return Keyring(settings.client_keys, settings.admin_keys)


def _build(settings: FineTuningSettings, _keyring: Keyring) -> Serving:
    if settings.client_keys and not settings.admin_keys:
        raise SystemExit("fine_tuning.admin_keys: set one: every route needs an admin key")
    isolates(settings.python, "fine_tuning")
    hide_from_children()
    bounds = ConnectionBounds(in_all=CONNECTIONS, per_address=CONNECTIONS)
    with one_sentence("fine_tuning", DirectoryInUse, OSError):
        return Serving(create_app(settings), LAST_ANSWERS_S, bounds=bounds, loop="asyncio")


if __name__ == "__main__":
    main()
