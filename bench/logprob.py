"""Measures the peak memory that the log-probabilities of tokens need beyond hidden states and weight.

python -m bench.logprob ours|naive TOKENS VOCABULARY WIDTH     forward and backward
"""

import sys

import torch
from torch import Tensor

from bench.measuring import print_facts, reset_peak, resident_mib, timed
from trainer_service.model.logprob_head import sampled_logprobs


def naive(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
    """The log-probabilities of the targets, from all logits at once."""
    logp_TV = torch.log_softmax(hidden_TH @ weight_VH.T, dim=-1)
    return logp_TV.gather(1, targets_T[:, None])[:, 0]


def ours(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
    return sampled_logprobs(hidden_TH, weight_VH, None, targets_T, torch.ones(len(hidden_TH)))[:, 0]


def main(arguments: list[str]) -> None:
    name, (tokens, vocabulary, width) = arguments[0], map(int, arguments[1:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_TH = torch.randn(tokens, width).requires_grad_()
    weight_VH = torch.randn(vocabulary, width).mul_(0.02).requires_grad_()
    targets_T = torch.randint(vocabulary, (tokens,))
    reset_peak()
    before = resident_mib()

    def learn() -> float:
        logprobs_T = {"ours": ours, "naive": naive}[name](hidden_TH, weight_VH, targets_T)
        logprobs_T.sum().backward()  # type: ignore[no-untyped-call]
        assert hidden_TH.grad is not None  # noqa: S101 - for mypy
        return float(torch.linalg.vector_norm(hidden_TH.grad))

    norm, cpu_s = timed(learn)
    print_facts(tokens=tokens, cpu_s=cpu_s, peak_mib=resident_mib(peak=True) - before, gradient_norm=norm)


if __name__ == "__main__":
    main(sys.argv[1:])
