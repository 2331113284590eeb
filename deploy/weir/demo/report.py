"""The results of a demo: `summary.json`, and a plot of reward, version and staleness over episodes."""

import json
from collections import Counter
from pathlib import Path

import httpx

from rollout_queue.http.callers import bearer
from rollout_queue.protocol.gateway_messages import PolicyPage, PushPage
from weir.demo.demo_episodes import WINDOW, EpisodeLog
from weir.demo.observer import Observation

TARGET = 0.9
START_BELOW = 0.35
VERSIONS = 10


def criterion(record: EpisodeLog, versions_served: int, verdicts: dict[str, int]) -> dict[str, bool]:
    """The parts of the criterion, which show that the model learned and that every session has a verdict.

    `met` is True if all parts hold.
    """
    start, end = record.reward_start, record.moving_average
    parts = {
        "starts_below": start is not None and start < START_BELOW,
        "reaches": end is not None and end >= TARGET,
        "versions": versions_served >= VERSIONS,
        "accounted_for": sum(verdicts.values()) == len(record.episodes),
    }
    return {**parts, "met": all(parts.values())}


def account(gateway_url: str, client_key: str) -> dict[str, int]:
    """The number of sessions by verdict, from the gateway's list."""
    verdicts: Counter[str] = Counter()
    cursor: str | None = "0"
    headers = bearer(client_key)
    with httpx.Client(base_url=gateway_url, headers=headers, timeout=60) as rest:
        while cursor is not None:
            page = rest.get("/sessions", params={"limit": 1000, "cursor": cursor}).raise_for_status().json()
            verdicts.update(row["verdict"]["code"] for row in page["data"])
            cursor = page["next_cursor"]
    return dict(sorted(verdicts.items()))


def served_versions(gateway_url: str, admin_key: str) -> set[int]:
    """The pushed versions that an engine has served, as far as the gateway knows them still: those whose push
    has ended well, and those that have files and are `serving` or `retired`."""
    headers = bearer(admin_key)
    with httpx.Client(base_url=gateway_url, headers=headers, timeout=30) as gateway:
        pushes = PushPage.read(gateway.get("/admin/policies/pushes").raise_for_status().content)
        policies = PolicyPage.read(gateway.get("/admin/policies").raise_for_status().content)
    served = {
        each.version for each in policies.data if each.state in ("serving", "retired") and each.location
    }
    return served | {push.version for push in pushes.data if push.state == "serving"}


def write_summary(path: Path, summary: dict[str, object]) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def draw(path: Path, record: EpisodeLog, snapshot: Observation) -> None:
    """Plot the reward over episodes, and below it the served version and the staleness of trained tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rewards = [each.reward for each in record.episodes if each.reward is not None]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    above.plot(_moving_average(rewards), color="tab:blue", label=f"moving average of {WINDOW}")
    above.axhline(TARGET, color="tab:gray", linestyle="--", linewidth=1, label=f"target {TARGET}")
    above.set(ylabel="reward", ylim=(0, 1.02), title="A model learns to use its tool")
    above.legend(loc="lower right")
    served = [(i, each.version) for i, each in enumerate(record.episodes) if each.version is not None]
    below.step([i for i, _ in served], [v for _, v in served], color="tab:green", label="version served")
    below.set(xlabel="episode", ylabel="policy version")
    staleness = below.twinx()
    at = [(_episode_at(record, seconds), value) for seconds, value in snapshot.staleness_at]
    staleness.plot([i for i, _ in at], [v for _, v in at], ".", color="tab:orange", label="staleness")
    staleness.set(ylabel="staleness of a step, versions", ylim=(0, None))
    below.legend(loc="upper left")
    staleness.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _moving_average(rewards: list[float]) -> list[float]:
    total, means = 0.0, []
    for index, reward in enumerate(rewards):
        total += reward - (rewards[index - WINDOW] if index >= WINDOW else 0.0)
        means.append(total / min(index + 1, WINDOW))
    return means


def _episode_at(record: EpisodeLog, seconds: float) -> int:
    return sum(episode.seconds <= seconds for episode in record.episodes)
