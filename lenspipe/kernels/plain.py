"""Plain: the readout from whole rows of logits, by torch alone: on any device, and where nothing is compiled.

Shapes: R rows (states), D width, V vocabulary, K top-k. At most BUFFERS blocks of R x V float32 are alive at once.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lenspipe.kernels.head import Head, Request, logits

BUFFERS = 4
"""Blocks of R x V float32 that are alive at once: logits, the last layer's log-probabilities, two of scratch."""

BLOCK_BYTES = 2**25
"""Size of one such block that reads fastest: larger ones are returned to the system and cleared again each time."""

FEWEST_ROWS = 64
"""Rows below which the product itself slows down, whatever the block's size."""


def row_bytes(head: Head, n_states: int) -> tuple[int, int]:
    """Bytes that one row takes while it is read, and the rows that read fastest at once."""
    n_vocab, width = head.weight_VD.shape
    return 4 * (BUFFERS * n_vocab + n_states * width), max(FEWEST_ROWS, BLOCK_BYTES // (4 * n_vocab))


def way(_head: Head, _dtype: torch.dtype) -> str:
    """Name how states are multiplied."""
    return "torch float32"


def read_rows(
    head: Head, normed_PRD: Tensor, request: Request, asked: Mapping[str, Tensor], final: int | None
) -> dict[str, Tensor]:
    """Compute the measures of a block of rows; see `kernels.readout.read_rows`."""
    final_RV = None
    if final is not None and request.measures & {"kl_final", "kl_reverse", "js_final", "final_top1"}:
        final_RV = log_softmax(logits(head, normed_PRD[final]))
        if "final_top1" in request.measures:
            broken_R = ~torch.isfinite(final_RV.amax(dim=1))
            asked = {**asked, "final_top1": top_k(final_RV, 1)[1][:, 0].long().masked_fill(broken_R, -1)}
    places = [_read_place(head, normed_RD, request, asked, final_RV) for normed_RD in normed_PRD]
    return {name: torch.stack([place[name] for place in places]) for name in places[0]}


def _read_place(
    head: Head, normed_RD: Tensor, request: Request, asked: Mapping[str, Tensor], final_logprob_RV: Tensor | None
) -> dict[str, Tensor]:
    logits_RV = logits(head, normed_RD)
    found: dict[str, Tensor] = {}
    if "topk" in request.measures:
        found["topk_logit"], found["topk_id"] = top_k(logits_RV, request.top_k)
    if "margin" in request.measures:
        best_RK = top_k(logits_RV, min(2, logits_RV.shape[1]))[0]
        found["margin"] = (
            best_RK[:, 0] - best_RK[:, 1] if best_RK.shape[1] > 1 else torch.full_like(best_RK[:, 0], math.inf)
        )
    for name, id_R in asked.items():
        found[f"{name}_logit"], found[f"{name}_rank"] = logit_and_rank(logits_RV, id_R)
    if "tracked" in request.measures:
        pairs = [
            logit_and_rank(logits_RV, torch.full((len(logits_RV),), token, device=logits_RV.device))
            for token in request.tracked
        ]
        found["tracked_logit"] = torch.stack([logit for logit, _ in pairs], dim=1)
        found["tracked_rank"] = torch.stack([rank for _, rank in pairs], dim=1)
    logprob_RV, lse_R = _normalize_(logits_RV)
    if "logsumexp" in request.measures:
        found["logsumexp"] = lse_R
    if "entropy" in request.measures:
        found["entropy"] = -expectation(logprob_RV.exp(), logprob_RV)
    if "logprob" in request.measures:
        ids = {**asked, "topk": found["topk_id"].long()} if "topk" in request.measures else dict(asked)
        ids |= (
            {"tracked": torch.tensor(request.tracked).expand(len(lse_R), -1)} if "tracked" in request.measures else {}
        )
        for name, id_RK in ids.items():
            picked = logprob_RV.gather(1, id_RK.clamp(min=0).reshape(len(lse_R), -1)).reshape(id_RK.shape)
            found[f"{name}_logprob"] = picked.masked_fill(id_RK < 0, math.nan)
    if "token_sets" in request.measures:
        masses = [logprob_RV[:, list(tokens)].exp().sum(dim=1) for tokens in request.sets]
        found["set_mass"] = torch.stack(masses, dim=1)
    if "varentropy" in request.measures:
        entropy_R = -expectation(logprob_RV.exp(), logprob_RV)
        found["varentropy"] = expectation(logprob_RV.exp(), (logprob_RV + entropy_R[:, None]).square())
    if "renyi2" in request.measures:
        found["renyi2"] = -(2 * logprob_RV).logsumexp(dim=1)
    if final_logprob_RV is not None:
        broken_R = final_logprob_RV.isnan().any(dim=1)
        for name in ("js_final", "kl_reverse", "kl_final"):  # the last one overwrites logprob_RV
            if name in request.measures:
                # A divergence is not negative; rounding may leave it a hair below zero.
                found[name] = (
                    _AGAINST[name](final_logprob_RV, logprob_RV).clamp_(min=0).masked_fill_(broken_R, math.nan)
                )
    return _mark_broken(found, ~torch.isfinite(lse_R))


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


def _reverse(p_logprob_RV: Tensor, q_logprob_RV: Tensor) -> Tensor:
    return divergence(q_logprob_RV, p_logprob_RV.clone())


def _shannon(p_logprob_RV: Tensor, q_logprob_RV: Tensor) -> Tensor:
    # With t = (q - p) / (q + p), four times the term is q + p of a function of t that is 0 at 0 and nowhere negative.
    p_RV, q_RV = p_logprob_RV.exp(), q_logprob_RV.exp()
    both_RV = p_RV + q_RV
    t_RV = (q_RV.sub_(p_RV).abs_() / both_RV).nan_to_num_(nan=0.0)
    near_RV = (1 - t_RV) * torch.log1p(-t_RV)
    return (both_RV * ((1 + t_RV) * torch.log1p(t_RV) + near_RV.nan_to_num_(nan=0.0))).sum(dim=1) / 4


_AGAINST = {"kl_final": divergence, "kl_reverse": _reverse, "js_final": _shannon}


def _mark_broken(found: dict[str, Tensor], broken_R: Tensor) -> dict[str, Tensor]:
    if broken_R.any():
        for values in found.values():
            values[broken_R] = math.nan if values.is_floating_point() else -1
    return found
