"""The packages of the product, and their modules."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "environments": ROOT / "environments",
    "gateway": ROOT / "gateway",
    "rollout_server": ROOT / "rollout_server",
    "trainer_service": ROOT / "trainer_service",
    "reward_service": ROOT / "reward_service",
    "fine_tuning": ROOT / "fine_tuning",
    "rollout_queue": ROOT / "queue" / "rollout_queue",
    "weir": ROOT / "deploy" / "weir",
}


def sources(package: str) -> Iterator[tuple[str, Path]]:
    """Every module of a package, with its dotted name."""
    root = PACKAGES[package]
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).with_suffix("").parts
        yield ".".join([package, *inside]), path
