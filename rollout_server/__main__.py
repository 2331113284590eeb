"""Runs one rollout server until SIGTERM: python -m rollout_server [--config weir.yaml]."""

from rollout_queue.http.callers import Keyring, refuse_open_binding
from rollout_queue.http.http_server import serve
from rollout_queue.starting import begin_tracing, start
from rollout_server.app import create_app
from rollout_server.engine.command import find_device
from rollout_server.engine.process import port_in_use
from rollout_server.server import RolloutServer, build_server, port_message
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.weight_files import BrokenWeights
from rollout_server.weights.weights_store import DirectoryTaken, WeightsClaim, claim_weights

LAST_ANSWERS_S = 3.0
"""How long requests to this server may still take after the engine has drained. The time is short, because a
reload has no use by then."""


def main() -> None:
    settings = start("rollout_server", "Runs one SGLang engine.", RolloutServerSettings)
    begin_tracing(settings.otel, "weir-rollout-server")
    keyring = Keyring(admin_keys=settings.admin_keys, rollout_server_key=settings.rollout_server_key)
    refuse_open_binding(settings.host, keyring)
    _refuse_taken_ports(settings)
    try:
        claim = claim_weights(settings)
    except (DirectoryTaken, OSError) as error:
        raise SystemExit(f"rollout_server.weights_dir: {error}") from error
    server = _built(settings, claim)
    serve(
        create_app(server, keyring),
        settings.host,
        settings.port,
        LAST_ANSWERS_S,
        server.leave,
        access_log=settings.access_log,
    )


def _built(settings: RolloutServerSettings, claim: WeightsClaim) -> RolloutServer:
    """End the process with one sentence if the engine would fail at every start, or at the first push."""
    try:
        return build_server(settings, find_device(settings.engine_device), claim.directory)
    except (BrokenWeights, OSError) as error:
        claim.lock.close()
        raise SystemExit(f"rollout_server.model_path is not a model that can be served: {error}") from error


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
