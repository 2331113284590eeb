"""Which version answers calls now, if the gateway of the run says so."""

from rollout_queue.protocol.message import MalformedMessage
from weir.stack import state
from weir.stack.probes import system_status
from weir.stack.settings import StackSettings


def served_version(settings: StackSettings) -> int | None:
    """None if no gateway runs in the run directory, or if it does not answer."""
    found = state.read(settings.run_dir)
    if found is None or found.gateway_url is None:
        return None
    try:
        return system_status(found.gateway_url, next(iter(settings.admin_keys), None)).policy.serving
    except (OSError, MalformedMessage):
        return None
