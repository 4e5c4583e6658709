"""Marginal: the sum over rows of their probabilities: how often each token is predicted.

P places, R rows, D width, V vocabulary. A probability needs its row's logsumexp, known only at the end of a walk over
the vocabulary: this is a second walk, and a second product. By torch alone, on any device.
"""

import torch
from torch import Tensor

from lenspipe.kernels.head import Head

STRIDE = 512
"""Tokens that are multiplied at once."""


def add_up(head: Head, normed_PRD: Tensor, logsumexp_PR: Tensor, counted_R: Tensor) -> tuple[Tensor, Tensor]:
    """Add up softmax(logits) over rows.

    Args:
        head: the unembedding.
        normed_PRD: states after the final norm.
        logsumexp_PR: of their logits; NaN marks a row that is broken, which adds nothing.
        counted_R: bool; the other rows add nothing.

    Returns:
        Sums, float64 [P, V], and the number of rows that were added, int64 [P].
    """
    counted_PR = counted_R & logsumexp_PR.isfinite()
    states = [normed_RD[counted_R].float() for normed_RD, counted_R in zip(normed_PRD, counted_PR, strict=True)]
    lse = [lse_R[counted_R] for lse_R, counted_R in zip(logsumexp_PR, counted_PR, strict=True)]
    sum_PV = normed_PRD.new_zeros((len(normed_PRD), head.vocab_size), dtype=torch.float64)
    for start in range(0, head.vocab_size, STRIDE):
        stop = min(start + STRIDE, head.vocab_size)
        weight_DN = head.weight_VD[start:stop].float().T
        for sum_V, state_RD, lse_R in zip(sum_PV, states, lse, strict=True):
            logits_RN = state_RD @ weight_DN
            if head.bias_V is not None:
                logits_RN += head.bias_V[start:stop]
            probability_RN = head.arithmetic.apply_(logits_RN).sub_(lse_R[:, None]).exp_()
            sum_V[start:stop] = probability_RN.sum(dim=0, dtype=torch.float64)
    return sum_PV, counted_PR.sum(dim=1)
