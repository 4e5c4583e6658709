"""Fused: the readout without its logits: products tile by tile of the vocabulary, each read while it is in cache.

P places (states of the same rows at different sites), R rows, D width, V vocabulary, K top-k, Q tokens asked for.
Panel: one thread's work, some rows at some places. Operand: L lanes, states that are multiplied and read side by side.
Only tiles of TILE x L logits exist, and no number depends on how many threads there are.
"""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from threading import Barrier

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lenspipe.kernels import tile
from lenspipe.kernels.head import Head, Request
from lenspipe.kernels.product import choose_product
from lenspipe.kernels.walk import FINAL_SUMS, Array, Reference, State, Walk

LANES = 128
"""Lanes of an operand: enough for the product, few enough for a tile to stay in a core's cache."""

GRAIN = 16
"""Lanes are filled up to a multiple of this, so that all are computed by vector instructions, which round alike."""

PANELS = 2
"""Panels of a block for each thread, so that none waits long for the others."""

_SUMS = {
    "logsumexp": tile.SUMS,
    "entropy": tile.SUMS,
    "logprob": tile.SUMS,
    "token_sets": tile.SUMS,
    "varentropy": tile.SUMS | tile.MOMENTS,
    "renyi2": tile.SUMS | tile.MOMENTS,
    "kl_final": tile.SUMS | tile.DIVERGENCE,
    "kl_reverse": tile.SUMS | tile.REVERSE,
    "js_final": tile.SUMS | tile.SHANNON,
}
"""Sums that a measure needs."""


def row_bytes(head: Head, n_states: int) -> tuple[int, int]:
    """Bytes that one row takes while it is read, and the rows that read fastest at once."""
    as_captured_normed_and_laid_out = 3
    row = 4 * as_captured_normed_and_laid_out * n_states * head.weight_VD.shape[1]
    return row, PANELS * LANES * torch.get_num_threads()


def way(head: Head, dtype: torch.dtype) -> str:
    """Name how states of this dtype are multiplied."""
    return choose_product(head.weight_VD.dtype, dtype, head.weight_VD.shape[1]).way


def read_rows(
    head: Head, normed_PRD: Tensor, request: Request, asked: Mapping[str, Tensor], final: int | None
) -> dict[str, Tensor]:
    """Compute the measures of a block of rows; see `kernels.readout.read_rows`."""
    n_places, n_rows, width = normed_PRD.shape
    wanted = 0
    for name in request.measures:
        wanted |= _SUMS.get(name, 0)
    product = choose_product(head.weight_VD.dtype, normed_PRD.dtype, width)
    sets = request.sets if "token_sets" in request.measures else ()
    best = [request.top_k] * ("topk" in request.measures) + [2] * ("margin" in request.measures)
    walk = Walk(head, product, min(max(best, default=0), head.vocab_size), wanted, sets)
    block = _Block(walk, normed_PRD, request, asked, final)
    panels, n_threads = _cut(n_places, n_rows, torch.get_num_threads()), torch.get_num_threads()
    if len(panels) == 1 or n_threads == 1:
        parts = [block.read(*panel) for panel in panels]
    else:
        parts = list(_threads(n_threads, os.getpid()).map(lambda panel: block.read(*panel), panels))
    return _joined(panels, parts, n_places, n_rows)


def _cut(n_places: int, n_rows: int, n_threads: int) -> list[tuple[slice, slice]]:
    """Cut a block into panels, as high as is fastest or as gives every thread one, and along places if need be."""
    share = -(-n_rows * n_places // n_threads)
    height = min(LANES, -(-share // GRAIN) * GRAIN)
    heights = [slice(start, min(start + height, n_rows)) for start in range(0, n_rows, height)]
    parts = min(n_places, -(-n_threads // len(heights)))
    width = -(-n_places // parts)
    return [(slice(p, min(p + width, n_places)), rows) for rows in heights for p in range(0, n_places, width)]


def _joined(
    panels: list[tuple[slice, slice]], parts: list[dict[str, Array]], n_places: int, n_rows: int
) -> dict[str, Tensor]:
    found = {}
    for name, first in parts[0].items():
        whole = np.empty((n_places, n_rows, *first.shape[2:]), first.dtype)
        for panel, part in zip(panels, parts, strict=True):
            whole[panel] = part[name]
        found[name] = torch.from_numpy(whole)
    return found


@cache
def _threads(n_threads: int, _process: int) -> ThreadPoolExecutor:
    """Start the threads that read, each multiplying alone; a forked process has its own."""
    pool, ready = ThreadPoolExecutor(n_threads, "lenspipe-read"), Barrier(n_threads)

    def alone() -> None:
        torch.get_num_threads()  # takes over the number that holds for new threads, which is otherwise done later
        torch.set_num_threads(1)
        ready.wait()

    for started in [pool.submit(alone) for _ in range(n_threads)]:
        started.result()
    torch.set_num_threads(n_threads)  # the number for new threads, which each of these has set to 1
    return pool


def _lanes(values: Array, share: int, empty: int) -> Array:
    """Lay out what belongs to rows, [..., R], for lanes of `share` places."""
    tiled = np.tile(values, share)
    return np.pad(tiled, [(0, 0)] * (values.ndim - 1) + [(0, -tiled.shape[-1] % GRAIN)], constant_values=empty)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of rows and what is asked of them: the arguments of `read_rows`."""

    walk: Walk
    normed_PRD: Tensor
    request: Request
    asked: Mapping[str, Tensor]
    final: int | None

    def read(self, places: slice, rows: slice) -> dict[str, Array]:
        """Read one panel: [places, rows, ...]."""
        id_QR = self._ids(rows)
        n_rows = id_QR.shape[1]
        left = list(range(places.start, places.stop))
        found: dict[int, dict[str, Array]] = {}
        top1 = "final_top1" in self.request.measures
        final, norm_2R = self.final if top1 or self.walk.wanted & FINAL_SUMS else None, np.empty((2, 0))
        if final is not None:
            id_QL = _lanes(id_QR, 1, -1)
            alone = replace(self.walk, k=max(self.walk.k, int(top1)), wanted=self.walk.wanted | tile.SUMS)
            state = alone.read([self._operand([final], rows)], id_QL, None)
            norm_2R = state.norms[0, :, :n_rows]
            if top1:
                best_id_R = np.where(state.broken[0], -1, state.best(0)[1][:, 0])[:n_rows]
                id_QR = np.concatenate([id_QR, best_id_R[None]])
            elif final in left:
                left.remove(final)
                lanes = self._measures(state, 0, id_QL, state.norms[0])
                found[final] = {name: v[:n_rows] for name, v in lanes.items()}
        # Where rows are few, several places share an operand; the last one is filled up with a place read twice.
        share = max(1, min(len(left), LANES // n_rows))
        groups = [left[i : i + share] for i in range(0, len(left), share)]
        if groups:
            filled = [group + group[-1:] * (share - len(group)) for group in groups]
            operands = [self._operand(group, rows) for group in filled]
            id_QL, reference = _lanes(id_QR, share, -1), None
            if final is not None:
                reference = Reference(self._operand([final] * share, rows), _lanes(norm_2R, share, 0))
            state = self.walk.read(operands, id_QL, reference)
            for g, group in enumerate(groups):
                lanes = self._measures(state, g, id_QL, reference.norm_2L if reference else None)
                for i, place in enumerate(group):
                    found[place] = {name: v[i * n_rows : (i + 1) * n_rows] for name, v in lanes.items()}
        return {name: np.stack([found[place][name] for place in sorted(found)]) for name in found[places.start]}

    def _operand(self, places: list[int], rows: slice) -> Tensor:
        """Lay out the states of some places side by side, filled up with zeros to a multiple of GRAIN."""
        state_LD = self.normed_PRD[places, rows].flatten(0, 1)
        filled: Tensor = pad(state_LD, (0, 0, 0, -len(state_LD) % GRAIN))
        return self.walk.product.lay_out(filled)

    def _ids(self, rows: slice) -> Array:
        """Tokens asked for: those of each row, then the tracked ones; [Q, R]."""
        own = [ids[rows].numpy() for ids in self.asked.values()]
        n_rows = rows.stop - rows.start
        tracked = self.request.tracked if "tracked" in self.request.measures else ()
        return np.array([*own, *([token] * n_rows for token in tracked)], np.int64).reshape(-1, n_rows)

    @np.errstate(all="ignore")  # rows that are broken, and marked at the end
    def _measures(self, state: State, g: int, id_QL: Array, final_norm_2L: Array | None) -> dict[str, Array]:
        """Turn the state of operand g into the variables asked for: [L, ...]."""
        measures, sum_SL, lse_L = self.request.measures, state.sum_GSL[g], state.norms[g].sum(axis=0)
        found: dict[str, Array] = {}
        if "topk" in measures:
            found["topk_logit"], found["topk_id"] = (x[:, : self.request.top_k] for x in state.best(g))
        logit_LQ = np.where(id_QL < 0, np.float32(math.nan), state.seen_GQL[g]).T
        rank_LQ = np.where(id_QL < 0, np.int32(-1), state.count_GQL[g]).T
        for q, name in enumerate(self.asked):
            found[f"{name}_logit"], found[f"{name}_rank"] = logit_LQ[:, q], rank_LQ[:, q]
        if "tracked" in measures:
            at = slice(len(self.asked), len(self.asked) + len(self.request.tracked))
            found["tracked_logit"], found["tracked_rank"] = logit_LQ[:, at], rank_LQ[:, at]
        if "final_top1" in measures:
            found["final_top1_logit"], found["final_top1_rank"] = logit_LQ[:, -1], rank_LQ[:, -1]
        if "token_sets" in measures:
            found["set_mass"] = state.mass_GML[g].T
        if "margin" in measures:
            best_LK = state.best(g)[0]
            found["margin"] = best_LK[:, 0] - (best_LK[:, 1] if best_LK.shape[1] > 1 else -np.inf)
        if "logsumexp" in measures:
            found["logsumexp"] = lse_L
        if "entropy" in measures:
            found["entropy"] = np.log(sum_SL[0]) - sum_SL[1] / sum_SL[0]
        if "varentropy" in measures:
            mean_L = sum_SL[1] / sum_SL[0]
            found["varentropy"] = np.maximum(sum_SL[2] / sum_SL[0] - mean_L * mean_L, 0)
        if "renyi2" in measures:
            found["renyi2"] = 2 * np.log(sum_SL[0]) - np.log(sum_SL[3])
        # A divergence is not negative; rounding may leave it a hair below zero.
        if final_norm_2L is not None:
            final_lse_L = final_norm_2L.sum(axis=0)
            against = {
                "kl_final": sum_SL[5] + (lse_L - final_lse_L),
                "kl_reverse": sum_SL[4] / sum_SL[0] + (final_lse_L - lse_L),
                "js_final": sum_SL[6] / 2,
            }
            for name, values in against.items():
                if name in measures:
                    found[name] = np.where(np.isfinite(final_lse_L), np.maximum(values, 0), math.nan)
        if "logprob" in measures:
            for name in [name for name in found if name.endswith("_logit")]:
                norm_2L = state.norms[g].reshape(2, -1, *[1] * (found[name].ndim - 1))
                found[name.replace("_logit", "_logprob")] = (found[name] - norm_2L[0]) - norm_2L[1]
        for name, values in found.items():
            kept = values.astype(np.int32 if values.dtype.kind == "i" else np.float32)
            kept[state.broken[g]] = -1 if kept.dtype.kind == "i" else math.nan
            found[name] = kept
        return found
