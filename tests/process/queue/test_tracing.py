"""What a service imports that does not trace."""

import subprocess
import sys


def test_without_the_setting_no_tracing_of_the_sdk_is_imported() -> None:
    """redis-py imports the SDK's metrics wherever they are installed."""
    program = "import sys, gateway.__main__, rollout_server.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = loaded.stdout.split()
    assert not [
        name for name in names if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))
    ]
