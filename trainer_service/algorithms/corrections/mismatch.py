"""Computes metrics of the mismatch between the trainer's and the engine's log-probabilities of tokens.

`metrics.mismatch` is a case of `algorithms_golden.json` in the tests.
"""

from torch import Tensor

from trainer_service.algorithms.ratios import bounded
from trainer_service.algorithms.row_index import RowIndex
from trainer_service.algorithms.sums import Sums

MEANS = (
    "kl",
    "kl_current",
    "k3",
    "abs_logp",
    "abs_logp_current",
    "train_ppl",
    "rollout_ppl",
    "log_ppl",
    "abs_log_ppl",
    "ppl_ratio",
)


def mismatch_sums(
    lp_train_T: Tensor, lp_roll_T: Tensor, rows_T: Tensor, current_T: Tensor | None = None
) -> Sums:
    """The sums over T tokens, and over whole rows, that `mismatch` needs. T must be at least 1, and all
    log-probabilities finite, in nats. `current_T` are the tokens that the present version sampled."""
    lp_train_T, lp_roll_T = lp_train_T.double(), lp_roll_T.double()
    log_rho_T = lp_train_T - lp_roll_T
    rho_T = bounded(log_rho_T).exp()
    rows = RowIndex.of(rows_T)
    total_R, mean_R = rows.sum(log_rho_T), rows.mean(log_rho_T)
    own_T = log_rho_T[:0] if current_T is None else log_rho_T[current_T]
    current = {"mismatch/abs_logp_current": own_T.abs(), "mismatch/kl_current": -own_T}
    return Sums.of(
        {
            **(current if own_T.numel() else {}),
            "mismatch/kl": -log_rho_T,
            "mismatch/k3": rho_T - log_rho_T - 1,
            "mismatch/abs_logp": log_rho_T.abs(),
            "mismatch/train_ppl": (-rows.mean(lp_train_T)).exp(),
            "mismatch/rollout_ppl": (-rows.mean(lp_roll_T)).exp(),
            "mismatch/log_ppl": -mean_R,
            "mismatch/abs_log_ppl": mean_R.abs(),
            "mismatch/ppl_ratio": (-mean_R).exp(),
            "mismatch/rho": rho_T,
            "mismatch/rho_squared": rho_T**2,
            "mismatch/rho_of_row_squared": bounded(2 * total_R).exp(),
        },
        largest={"mismatch/rho": rho_T, "mismatch/minus_rho": -rho_T},
    )


def mismatch(sums: Sums) -> dict[str, float]:
    """The metrics by name: means over tokens, and over rows for perplexities and `chi2_seq` (verl's rollout
    correction metrics; `metrics.mismatch`). None if no token had finite log-probabilities; without
    `abs_logp_current` and `kl_current` if no token was current."""
    if "mismatch/rho" not in sums.totals:
        return {}
    return {
        **{name: sums.mean(name) for each in MEANS if (name := f"mismatch/{each}") in sums.totals},
        "mismatch/chi2_token": sums.mean("mismatch/rho_squared") - 1,
        "mismatch/chi2_seq": sums.mean("mismatch/rho_of_row_squared") - 1,
        "mismatch/ess": sums.mean("mismatch/rho") ** 2 / sums.mean("mismatch/rho_squared"),
        "mismatch/rho_max": sums.largest["mismatch/rho"],
        "mismatch/rho_min": -sums.largest["mismatch/minus_rho"],
    }
