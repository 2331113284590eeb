"""Runs one rollout server until SIGTERM: python -m rollout_server [--config weir.yaml]."""

from rollout_queue.http.callers import Keyring
from rollout_queue.starting import Serving, begin_tracing, one_sentence, serve_main
from rollout_server.app import create_app
from rollout_server.engine.command import find_device
from rollout_server.engine.process import port_in_use
from rollout_server.server import build_server, port_message
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.weight_files import BrokenWeights
from rollout_server.weights.weights_store import DirectoryTaken, claim_weights

LAST_ANSWERS_S = 3.0
"""How long requests to this server may still take after the engine has drained. The time is short, because a
reload has no use by then."""


def main() -> None:
    serve_main("rollout_server", "Runs one SGLang engine.", RolloutServerSettings, _keys, _build)


def _keys(settings: RolloutServerSettings) -> Keyring:
    return Keyring(admin_keys=settings.admin_keys, rollout_server_key=settings.rollout_server_key)


def _build(settings: RolloutServerSettings, keyring: Keyring) -> Serving:
    begin_tracing(settings.otel, "weir-rollout-server")
    _refuse_taken_ports(settings)
    with one_sentence("rollout_server.weights_dir", DirectoryTaken, OSError):
        claim = claim_weights(settings)
    # The engine would fail at every start, or at the first push.
    with one_sentence("rollout_server.model_path is not a model that can be served", BrokenWeights, OSError):
        server = build_server(settings, find_device(settings.engine_device), claim.directory)
    return Serving(create_app(server, keyring), LAST_ANSWERS_S, server.leave)


def _refuse_taken_ports(settings: RolloutServerSettings) -> None:
    """End the process with one sentence if it cannot listen."""
    for host, port, field in (
        (settings.host, settings.port, "port"),
        (settings.engine_host, settings.engine_port, "engine_port"),
    ):
        if port_in_use(host, port):
            raise SystemExit(port_message(host, port, field))


if __name__ == "__main__":
    main()
