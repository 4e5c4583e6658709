"""CUDA: the readout on a GPU: products by cuBLAS, tile by tile of the vocabulary, each read once by a Triton kernel.

P places (states of the same rows at different sites), R rows, S states (P times R), D width, V vocabulary, K top-k,
Q tokens asked for. No number depends on the block that a state is read in, but for the last digits of its products.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lenspipe.kernels import plain
from lenspipe.kernels.cuda_walk import TILE, State, Walk, multiplies_low
from lenspipe.kernels.head import Head, Request

STATES = 4096
"""States that read fastest at once: enough for a product to fill a GPU."""

_SUMS = {
    "logsumexp": {"SUMS"},
    "entropy": {"SUMS"},
    "logprob": {"SUMS"},
    "token_sets": {"SUMS"},
    "varentropy": {"SUMS", "MOMENTS"},
    "renyi2": {"SUMS", "MOMENTS"},
    "kl_final": {"SUMS", "DIVERGENCE"},
    "kl_reverse": {"SUMS", "REVERSE"},
    "js_final": {"SUMS"},
}
"""Sums that a measure needs."""

KNOWN = frozenset(_SUMS) | {
    "topk", "margin", "target_0", "target", "target_2", "target_3", "answer", "tracked", "final_top1",
    "residual_norm", "cosine_final", "cosine_previous", "marginal",
}  # fmt: skip
"""Measures that are read here, or that are none of logits; where there is another, all are read the plain way."""


def row_bytes(head: Head, n_states: int) -> tuple[int, int]:
    """Bytes that one row takes while it is read, and the rows that read fastest at once."""
    n_vocab, width = head.weight_VD.shape
    as_captured_normed_and_in_float32, found = 3, 2048
    state = 4 * (as_captured_normed_and_in_float32 * width + min(TILE, n_vocab)) + found
    return n_states * state, max(1, STATES // n_states)


def way(head: Head, dtype: torch.dtype) -> str:
    """Name how states of this dtype are multiplied."""
    if multiplies_low(head.weight_VD, dtype):
        return f"cuBLAS {str(dtype).removeprefix('torch.')}"
    # TF32 is allowed or not for the whole process, by its owner; its numbers are others, so it is named.
    matmul = torch.backends.cuda.matmul
    tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32  # torch 2.9
    return "cuBLAS TF32" if tf32 else "cuBLAS float32"


def read_rows(
    head: Head, normed_PRD: Tensor, request: Request, asked: Mapping[str, Tensor], final: int | None
) -> dict[str, Tensor]:
    """Compute the measures of a block of rows; see `kernels.readout.read_rows`."""
    if not request.measures <= KNOWN:
        return _read_plainly(head, normed_PRD, request, asked, final)
    n_places, n_rows, _ = normed_PRD.shape
    with torch.cuda.device(normed_PRD.get_device()):
        if "final_top1" in request.measures and final is not None:
            alone = Walk(head, normed_PRD[final], n_rows, None)
            best = _Block(alone, Request(frozenset({"topk"}), 1), {}).read()
            asked = {**asked, "final_top1": best["topk_id"][:, 0]}
        found = _Block(Walk(head, normed_PRD.flatten(0, 1), n_rows, final), request, asked).read()
    return {name: values.reshape(n_places, n_rows, *values.shape[1:]) for name, values in found.items()}


def _read_plainly(
    head: Head, normed_PRD: Tensor, request: Request, asked: Mapping[str, Tensor], final: int | None
) -> dict[str, Tensor]:
    _, height = plain.row_bytes(head, len(normed_PRD))  # `row_bytes` promises no room for more whole rows of logits
    parts = []
    for start in range(0, normed_PRD.shape[1], height):
        rows = slice(start, start + height)
        some = {name: id_R[rows] for name, id_R in asked.items()}
        parts.append(plain.read_rows(head, normed_PRD[:, rows], request, some, final))
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of states and what is asked of them."""

    walk: Walk
    request: Request
    asked: Mapping[str, Tensor]

    def read(self) -> dict[str, Tensor]:
        """Read the states: [S, ...]."""
        id_QR, measures = self._ids(), self.request.measures
        wanted = frozenset[str]().union(*(_SUMS.get(name, ()) for name in measures))
        best = [self.request.top_k] * ("topk" in measures) + [2] * ("margin" in measures)
        state = self.walk.read(id_QR, min(max(best, default=0), self.walk.head.vocab_size), wanted)
        if "js_final" in measures:
            self.walk.add_shannon(state)
        found = self._best(state) | self._tokens(state, id_QR)
        if "logprob" in measures:
            found |= _with_logprobs(found, state.norms)
        if "token_sets" in measures:
            masses = [self.walk.mass(tokens, state.norms) for tokens in self.request.sets]
            found["set_mass"] = torch.stack(masses, dim=1)
        of_sums = _distribution(state) | self._against_final(state)
        found |= {name: values for name, values in of_sums.items() if name in measures}
        return {name: _finished(values, state.broken) for name, values in found.items()}

    def _ids(self) -> Tensor:
        """Tokens asked for: those of each row, then the tracked ones; int64 [Q, R]."""
        tracked = self.request.tracked if "tracked" in self.request.measures else ()
        n_rows, device = self.walk.n_rows, self.walk.normed_SD.device
        own = [id_R.to(device, torch.int64)[None] for id_R in self.asked.values()]
        return torch.cat([*own, torch.tensor(tracked, dtype=torch.int64, device=device)[:, None].repeat(1, n_rows)])

    def _best(self, state: State) -> dict[str, Tensor]:
        found = {}
        if "topk" in self.request.measures:
            found["topk_logit"] = state.best_SK[:, : self.request.top_k]
            found["topk_id"] = state.best_id_SK[:, : self.request.top_k]
        if "margin" in self.request.measures:
            second_S = state.best_SK[:, 1] if state.best_SK.shape[1] > 1 else -math.inf
            found["margin"] = state.best_SK[:, 0] - second_S
        return found

    def _tokens(self, state: State, id_QR: Tensor) -> dict[str, Tensor]:
        missing_SQ = self.walk.by_state(id_QR).T < 0
        logit_SQ = state.seen_QS.T.masked_fill(missing_SQ, math.nan)
        rank_SQ = state.ranks.T.masked_fill(missing_SQ, -1)
        found = {}
        for q, name in enumerate(self.asked):
            found[f"{name}_logit"], found[f"{name}_rank"] = logit_SQ[:, q], rank_SQ[:, q]
        if "tracked" in self.request.measures:
            behind = slice(len(self.asked), None)
            found["tracked_logit"], found["tracked_rank"] = logit_SQ[:, behind], rank_SQ[:, behind]
        return found

    def _against_final(self, state: State) -> dict[str, Tensor]:
        if self.walk.final is None:
            return {}
        start, n_rows, sum_XS = self.walk.final * self.walk.n_rows, self.walk.n_rows, state.sum_XS

        def of_final(values_S: Tensor) -> Tensor:
            return self.walk.by_state(values_S[start : start + n_rows])

        lse_S = state.norms.sum(dim=0)
        above_S = lse_S - of_final(lse_S)
        found = {
            "kl_final": sum_XS[5] / of_final(sum_XS[0]) + above_S,
            "kl_reverse": sum_XS[4] / sum_XS[0] - above_S,
            "js_final": sum_XS[6] / 2,
        }
        # A divergence is not negative; rounding may leave it a hair below zero.
        broken_S = of_final(state.broken)
        return {name: values.clamp(min=0).masked_fill(broken_S, math.nan) for name, values in found.items()}


def _distribution(state: State) -> dict[str, Tensor]:
    sum_XS, (largest_S, above_S) = state.sum_XS, state.norms
    mean_S = sum_XS[1] / sum_XS[0]
    return {
        "logsumexp": largest_S + above_S,
        "entropy": above_S - mean_S,
        "varentropy": (sum_XS[2] / sum_XS[0] - mean_S.square()).clamp(min=0),
        "renyi2": 2 * above_S - sum_XS[3].log(),
    }


def _with_logprobs(found: dict[str, Tensor], norm_2S: Tensor) -> dict[str, Tensor]:
    added = {}
    for name, values in found.items():
        if name.endswith("_logit"):
            largest, above = norm_2S.reshape(2, -1, *[1] * (values.ndim - 1))
            added[name.replace("_logit", "_logprob")] = (values - largest) - above
    return added


def _finished(values: Tensor, broken_S: Tensor) -> Tensor:
    """Bring a variable to its type, and mark broken states."""
    broken = broken_S.reshape(-1, *[1] * (values.ndim - 1))
    if values.is_floating_point():
        return values.float().masked_fill(broken, math.nan)
    return values.to(torch.int32).masked_fill(broken, -1)
