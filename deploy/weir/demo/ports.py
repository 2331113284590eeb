"""The ports of the demos, which differ from those of `weir up`, so that both can run."""

from weir.stack.settings import StackSettings

DEMO_PORTS = {
    "gateway_port": 8010,
    "rollout_port": 8110,
    "engine_port": 30010,
    "trainer_port": 8210,
    "redis_port": 6390,
}
"""Unless others are set."""


def on_own_ports(settings: StackSettings) -> StackSettings:
    own = {name: port for name, port in DEMO_PORTS.items() if name not in settings.model_fields_set}
    return settings.model_copy(update=own)
