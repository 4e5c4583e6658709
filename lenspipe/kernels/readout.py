"""Readout: the measures of a block of states, from one matrix product.

Shapes: R rows (states), D width, V vocabulary, K top-k, T tracked tokens. Logits are float32 and those after the
family's own arithmetic. A block of R x V is the only large thing here, and there are at most BUFFERS of them:
`rows_per_block` says how many rows a memory budget allows.
Mathematics on arrays only: no files, no model names.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lenspipe.errors import RequestError

BUFFERS = 4
"""Blocks of R x V float32 that are alive at once: logits, the last layer's log-probabilities, two of scratch."""

BLOCK_BYTES = 2**25
"""Size of one such block that reads fastest: larger ones are returned to the system and cleared again each time."""

FEWEST_ROWS = 64
"""Rows below which the product itself slows down, whatever the block's size."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a family does to its logits after the unembedding: multiply, divide, then cap."""

    multiply: float | None = None
    divide: float | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        steps = [f"{name} {value:g}" for name, value in self.as_dict().items() if value is not None]
        return ", then ".join(steps) or "none"

    def as_dict(self) -> dict[str, float | None]:
        """The three steps by name."""
        return {"multiply": self.multiply, "divide": self.divide, "softcap": self.softcap}

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Apply all steps, leaving the argument as it is; a gradient passes."""
        if self.multiply is not None:
            logits_RV = logits_RV * self.multiply
        if self.divide is not None:
            logits_RV = logits_RV / self.divide
        return logits_RV if self.softcap is None else (logits_RV / self.softcap).tanh() * self.softcap

    def apply_(self, logits_RV: Tensor) -> Tensor:
        """Apply all steps in place."""
        if self.multiply is not None:
            logits_RV.mul_(self.multiply)
        if self.divide is not None:
            logits_RV.div_(self.divide)
        if self.softcap is not None:
            logits_RV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_RV


@dataclass(frozen=True, slots=True)
class Head:
    """The unembedding: float32 operands and the arithmetic behind the product.

    Attributes:
        weight_VD: float32.
        bias_V: float32, or None.
        arithmetic: what follows the product.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    arithmetic: Arithmetic

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return self.weight_VD.shape[0]


@dataclass(frozen=True, slots=True)
class Request:
    """Which measures to compute: names as in variables.MEASURES, and `tracked` and `answer`."""

    measures: frozenset[str]
    top_k: int
    tracked: tuple[int, ...] = ()


def rows_per_block(budget: int, head: Head, n_states: int, setting: str = "run.memory") -> int:
    """Count the rows to read at once: as many as read fastest, and no more than the budget allows.

    Args:
        budget: bytes.
        head: the unembedding.
        n_states: residuals of one row that are held while reading, the model's depth + 1.
        setting: what the budget is called where it was set.

    Raises:
        RequestError: the budget does not hold one row.
    """
    row = 4 * (BUFFERS * head.vocab_size + n_states * head.weight_VD.shape[1])
    if budget < row:
        raise RequestError(f"{setting} is {budget} bytes, but one row of logits takes {row}: allow more")
    return min(budget // row, max(FEWEST_ROWS, BLOCK_BYTES // (4 * head.vocab_size)))


def logits(head: Head, normed_RD: Tensor) -> Tensor:
    """Unembed normed states: float32 logits_RV."""
    operand = normed_RD.to(torch.float32)
    product = operand @ head.weight_VD.T if head.bias_V is None else torch.addmm(head.bias_V, operand, head.weight_VD.T)
    return head.arithmetic.apply(product) if product.requires_grad else head.arithmetic.apply_(product)


def log_softmax(logits_RV: Tensor) -> Tensor:
    """Log-probabilities over the full vocabulary; -inf stays -inf. Overwrites logits_RV."""
    return _normalize_(logits_RV)[0]


def _normalize_(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into log-probabilities, in place, and return logsumexp beside them."""
    # Relative to the largest logit first, so that large logits cost no digits of small differences.
    largest_R = logits_RV.amax(dim=1)
    relative_RV = logits_RV.sub_(largest_R[:, None])
    lse_R = relative_RV.exp().sum(dim=1).log()
    return relative_RV.sub_(lse_R[:, None]), largest_R + lse_R


def read_rows(
    head: Head,
    normed_RD: Tensor,
    request: Request,
    target_R: Tensor,
    answer_R: Tensor,
    final_logprob_RV: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the measures of a block of rows.

    Args:
        head: the unembedding.
        normed_RD: states after the final norm.
        request: which measures.
        target_R, answer_R: int64 ids, -1 where there is none (rank -1, logit NaN).
        final_logprob_RV: the last layer's log-probabilities of the same rows, for kl_final.

    Returns:
        One tensor of R rows per variable of variables.py that the measures bring. A row whose logits hold NaN
        or +inf has rank -1, id -1 and NaN throughout.
    """
    logits_RV = logits(head, normed_RD)
    found: dict[str, Tensor] = {}
    if "topk" in request.measures:
        found["topk_logit"], found["topk_id"] = top_k(logits_RV, request.top_k)
    if "target" in request.measures:
        found["target_logit"], found["target_rank"] = logit_and_rank(logits_RV, target_R)
    if "answer" in request.measures:
        found["answer_logit"], found["answer_rank"] = logit_and_rank(logits_RV, answer_R)
    if "tracked" in request.measures:
        pairs = [logit_and_rank(logits_RV, torch.full_like(target_R, token)) for token in request.tracked]
        found["tracked_logit"] = torch.stack([logit for logit, _ in pairs], dim=1)
        found["tracked_rank"] = torch.stack([rank for _, rank in pairs], dim=1)
    logprob_RV, lse_R = _normalize_(logits_RV)
    if "logsumexp" in request.measures:
        found["logsumexp"] = lse_R
    if "entropy" in request.measures:
        found["entropy"] = -expectation(logprob_RV.exp(), logprob_RV)
    if "kl_final" in request.measures:
        if final_logprob_RV is None:
            raise ValueError("kl_final needs the last layer's log-probabilities")
        # A divergence is not negative; rounding may leave it a hair below zero.
        found["kl_final"] = divergence(final_logprob_RV, logprob_RV).clamp_(min=0)
        found["kl_final"][final_logprob_RV.isnan().any(dim=1)] = math.nan
    return _mark_broken(found, ~torch.isfinite(lse_R))


def top_k(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k largest logits, in order, ties to the lower id: values_RK, ids_RK (int32)."""
    n_vocab = logits_RV.shape[1]
    values_RK, ids_RK = torch.topk(logits_RV, min(k + 1, n_vocab), dim=1)
    # torch.topk breaks ties arbitrarily. Within the k, two stable sorts mend that. Where the k-th and the next are
    # equal, the choice itself may be wrong, and those rows are sorted in full.
    torn = (values_RK[:, k - 1] == values_RK[:, -1]).nonzero()[:, 0] if n_vocab > k else ids_RK.new_empty(0)
    values_RK, ids_RK = values_RK[:, :k], ids_RK[:, :k]
    by_id = ids_RK.argsort(dim=1)
    values_RK, ids_RK = values_RK.gather(1, by_id), ids_RK.gather(1, by_id)
    values_RK, order = values_RK.sort(dim=1, descending=True, stable=True)
    ids_RK = ids_RK.gather(1, order)
    for row in torn.tolist():
        ids_RK[row] = logits_RV[row].sort(descending=True, stable=True).indices[:k]
    return values_RK, ids_RK.to(torch.int32)


def logit_and_rank(logits_RV: Tensor, id_R: Tensor) -> tuple[Tensor, Tensor]:
    """Look up one token per row: its logit (float32) and its zero-based rank (int32).

    The rank counts strictly larger logits of the same product that gave the token's own logit.
    """
    missing_R = id_R < 0
    logit_R = logits_RV.gather(1, id_R.clamp(min=0)[:, None])
    rank_R = (logits_RV > logit_R).sum(dim=1, dtype=torch.int32)
    return logit_R[:, 0].masked_fill(missing_R, math.nan), rank_R.masked_fill_(missing_R, -1)


def expectation(prob_RV: Tensor, value_RV: Tensor) -> Tensor:
    """Sum prob * value over the vocabulary, where a probability of 0 adds 0; overwrites prob_RV."""
    return prob_RV.mul_(value_RV).nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf).sum(dim=1)


def divergence(p_logprob_RV: Tensor, q_logprob_RV: Tensor) -> Tensor:
    """Compute KL(p || q) per row, in nats, from log-probabilities; overwrites q_logprob_RV."""
    difference_RV = torch.sub(p_logprob_RV, q_logprob_RV, out=q_logprob_RV)
    return expectation(p_logprob_RV.exp(), difference_RV)


def _mark_broken(found: dict[str, Tensor], broken_R: Tensor) -> dict[str, Tensor]:
    if broken_R.any():
        for values in found.values():
            values[broken_R] = math.nan if values.is_floating_point() else -1
    return found
