"""`python -m weir.demo.agent_main`: runs the demo's agent against a running gateway.

WEIR_GATEWAY_URL is the address of the gateway. The agent uses the first key in WEIR_CLIENT_KEYS.
"""

import argparse
import asyncio
import json
import os
import sys

import httpx

from rollout_queue import clock
from rollout_queue.settings import secret
from weir.demo.demo_episodes import EpisodeLog, EpisodeRunner
from weir.demo.report import account
from weir.errors import StackError

SETTLE_S = 60.0
"""How long the sessions may take to get their final verdicts."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="weir.demo.agent_main", description=__doc__)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    gateway_url = os.environ.get("WEIR_GATEWAY_URL", "http://127.0.0.1:8000")
    client_key = secret("WEIR_CLIENT_KEYS").partition(",")[0]
    episodes = EpisodeRunner(gateway_url, client_key, group_size=8, groups_in_flight=4, seed=arguments.seed)
    try:
        record = asyncio.run(episodes.play(lambda so_far: len(so_far.episodes) >= arguments.episodes))
        verdicts = settled(gateway_url, client_key)
    except (StackError, httpx.HTTPError) as error:
        raise SystemExit(str(error)) from None
    json.dump(summary(record, verdicts), sys.stdout, indent=2)
    sys.stdout.write("\n")
    if not verdicts.get("trained"):
        raise SystemExit("no episode was trained")


def settled(gateway_url: str, client_key: str) -> dict[str, int]:
    """The number of sessions by verdict, as soon as some are trained and no verdict changes any more."""
    deadline = clock.monotonic() + SETTLE_S
    before, verdicts = None, account(gateway_url, client_key)
    while clock.monotonic() < deadline and (verdicts != before or not verdicts.get("trained")):
        clock.pause(2.0)
        before, verdicts = verdicts, account(gateway_url, client_key)
    return verdicts


def summary(record: EpisodeLog, verdicts: dict[str, int]) -> dict[str, object]:
    return {
        "episodes": len(record.episodes),
        "failed_episodes": record.failures,
        "reward_start": record.reward_start,
        "reward_end": record.moving_average,
        "sessions_by_verdict": verdicts,
    }


if __name__ == "__main__":
    main()
