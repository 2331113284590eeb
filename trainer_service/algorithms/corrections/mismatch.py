"""Computes metrics of the mismatch between the trainer's and the engine's log-probabilities of tokens.

`metrics.mismatch` is a case of `algorithms_golden.json` in the tests.
"""

from torch import Tensor

from trainer_service.algorithms.ratios import bounded
from trainer_service.algorithms.row_index import RowIndex


def mismatch(lp_train_T: Tensor, lp_roll_T: Tensor, rows_T: Tensor) -> dict[str, float]:
    """The metrics by name: means over the T tokens, and over rows for perplexities and `chi2_seq` (verl's
    rollout correction metrics; `metrics.mismatch`). T must be at least 1, and all log-probabilities finite,
    in nats."""
    lp_train_T, lp_roll_T = lp_train_T.double(), lp_roll_T.double()
    log_rho_T = lp_train_T - lp_roll_T
    rho_T = bounded(log_rho_T).exp()
    rows = RowIndex.of(rows_T)
    total_R, mean_R = rows.sum(log_rho_T), rows.mean(log_rho_T)
    return {
        "mismatch/kl": float(-log_rho_T.mean()),
        "mismatch/k3": float((rho_T - log_rho_T - 1).mean()),
        "mismatch/abs_logp": float(log_rho_T.abs().mean()),
        "mismatch/train_ppl": float((-rows.mean(lp_train_T)).exp().mean()),
        "mismatch/rollout_ppl": float((-rows.mean(lp_roll_T)).exp().mean()),
        "mismatch/log_ppl": float(-mean_R.mean()),
        "mismatch/abs_log_ppl": float(mean_R.abs().mean()),
        "mismatch/ppl_ratio": float((-mean_R).exp().mean()),
        "mismatch/chi2_token": float((rho_T**2).mean() - 1),
        "mismatch/chi2_seq": float(bounded(2 * total_R).exp().mean() - 1),
        "mismatch/ess": float(rho_T.sum() ** 2 / (len(rho_T) * (rho_T**2).sum())),
        "mismatch/rho_max": float(rho_T.max()),
        "mismatch/rho_min": float(rho_T.min()),
    }
