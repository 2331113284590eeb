"""The metrics of a run that the page's curves show."""

import math


def metrics_of(step: int, lift: float = 0.0) -> dict[str, float]:
    """One line of metrics, the same for each run."""
    wave = math.sin(step / 7) + math.sin(step / 1.7)
    learned = 1 - math.exp(-step / 900)
    return {
        "step": step,
        "version": step,
        "time": 1.7e9 + 40 * step,
        "reward_mean": round(0.15 + 0.7 * learned + 0.05 * wave + lift, 4),
        "loss": round(0.02 * wave, 5),
        "grad_norm": round(0.8 + 0.3 * abs(wave), 4),
        "entropy": round(0.9 - 0.5 * learned + 0.03 * wave, 4),
        "mismatch/kl": round(0.05 + 0.02 * wave, 4),
        "mismatch/kl_current": round(0.03 + 0.02 * wave + (0.19 if 2000 < step < 2040 else 0), 4),
        "mismatch/abs_logp": round(0.06 + 0.02 * abs(wave), 4),
        "mismatch/abs_logp_current": round(0.006 + 0.002 * abs(wave), 4),
        "staleness/total_mean": round(0.8 + 0.2 * wave, 3),
        "seconds/uptime": float(step if step <= 2200 else step - 2200),
        **({"reward/task/sums": round(0.2 + 0.7 * learned + lift, 4)} if step % 2 else {}),
        **({"reward/task/tool": round(0.9 * learned**2 + lift, 4)} if step % 3 and step > 600 else {}),
        "len/mean": round(180 + 240 * learned + 14 * wave, 1),
    }
