"""A Tinker loop that learns from what agents did through the gateway. `tool_agent.py` plays such sessions.

In an environment with `tinker` and httpx, with Weir's folder `deploy` in PYTHONPATH:
python examples/tinker_bridge.py MODEL
"""

import os
import sys
from pathlib import Path

import tinker
from tinker import types

from weir.tinker import datums, recorded

GATEWAY = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000")


def key(role: str) -> str | None:
    """The key that `weir up` wrote; a gateway without keys needs none."""
    file = Path(f"run/keys/{role}_keys")
    return file.read_text().split()[0] if file.exists() else None


def main() -> None:
    service = tinker.ServiceClient(base_url=GATEWAY, api_key=f"tml-{key('client')}")
    model = service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=1)
    made = datums(recorded(GATEWAY, key("admin")))
    print(f"{len(made)} rows of {len({row.session_id for _, row in made})} sessions")
    data = [each for each, _ in made]
    for _ in range(3):
        passed = model.forward_backward(data, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        print("loss", passed.result().metrics["loss:sum"])


if __name__ == "__main__":
    main()
