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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lenspipe.kernels import tile
from lenspipe.kernels.head import TILE, Head, Request
from lenspipe.kernels.product import Product, choose_product

Array = np.ndarray[Any, Any]

LANES = 128
"""Lanes of an operand: enough for the product, few enough for a tile to stay in a core's cache."""

GRAIN = 16
"""Lanes are filled up to a multiple of this, so that all are computed by vector instructions, which round alike."""

STRIDE = 16 * TILE
"""Tokens whose weights are prepared at once."""

PANELS = 2
"""Panels of a block for each thread, so that none waits long for the others."""

_DIVERGENCES = tile.DIVERGENCE | tile.REVERSE
_SUMS = {
    "logsumexp": tile.SUMS,
    "entropy": tile.SUMS,
    "logprob": tile.SUMS,
    "kl_final": tile.SUMS | tile.DIVERGENCE,
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
    walk = _Walk(head, product, request.top_k if "topk" in request.measures else 0, wanted)
    block = _Block(walk, normed_PRD, request, asked, final)
    panels, n_threads = _cut(n_places, n_rows, torch.get_num_threads()), torch.get_num_threads()
    if len(panels) == 1 or n_threads == 1:
        parts = [block.read(*panel) for panel in panels]
    else:
        parts = list(_threads(n_threads, os.getpid()).map(lambda panel: block.read(*panel), panels))
    return _joined(panels, parts, n_places, n_rows)


def _cut(n_places: int, n_rows: int, n_threads: int) -> list[tuple[slice, slice]]:
    """Cut a block into panels: along rows, and along places where rows are too few for all threads."""
    heights = [slice(start, min(start + LANES, n_rows)) for start in range(0, n_rows, LANES)]
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


@dataclass(frozen=True, slots=True)
class _Reference:
    """The last layer at an operand's lanes: laid out, and its logsumexp in two parts, as `_State.norms`."""

    operand: Tensor
    norm_2L: Array


@dataclass(frozen=True, slots=True)
class _State:
    """What G operands of L lanes have come to; arrays as `tile.absorb` takes them, with G in front."""

    largest_GL: Array
    nans_GL: Array
    best_GLK: Array
    best_id_GLK: Array
    asked_GQL: Array
    seen_GQL: Array
    count_GQL: Array
    sum_GSL: Array

    @classmethod
    def empty(cls, asked_GQL: Array, k: int) -> "_State":
        n, n_asked, lanes = asked_GQL.shape
        return cls(
            largest_GL=np.full((n, lanes), -np.inf, np.float32),
            nans_GL=np.zeros((n, lanes), np.int32),
            best_GLK=np.full((n, lanes, k), -np.inf, np.float32),
            best_id_GLK=np.full((n, lanes, k), tile.NO_TOKEN, np.int32),
            asked_GQL=asked_GQL,
            seen_GQL=asked_GQL.copy(),
            count_GQL=np.zeros((n, n_asked, lanes), np.int32),
            sum_GSL=np.zeros((n, tile.N_SUMS, lanes)),
        )

    @property
    def arrays(self) -> tuple[Array, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    @property
    def norms(self) -> Array:
        """Logsumexp in two parts, [G, 2, L]: the largest logit, and what is above it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.stack([self.largest_GL, np.log(self.sum_GSL[:, 0])], axis=1)

    def counted_by_another(self) -> bool:
        """Tell whether a logit asked for has rounded otherwise in its tile than in the product that gave it before."""
        same = (self.seen_GQL == self.asked_GQL) | (np.isnan(self.seen_GQL) & np.isnan(self.asked_GQL))
        return not bool(same.all())


@dataclass(frozen=True, slots=True)
class _Walk:
    """One way over the vocabulary: the same for all panels of a block."""

    head: Head
    product: Product
    k: int
    wanted: int

    def read(self, operands: list[Tensor], id_QL: Array, reference: _Reference | None) -> _State:
        """Read operands of L lanes each, all asked for the same tokens."""
        state = _State.empty(np.stack([self._asked(operand, id_QL) for operand in operands]), self.k)
        self._over(operands, id_QL, reference, state, self.wanted if reference else self.wanted & ~_DIVERGENCES)
        if state.counted_by_another():
            again = _State.empty(state.seen_GQL, 0)
            self._over(operands, id_QL, None, again, 0)
            state = replace(state, asked_GQL=again.asked_GQL, count_GQL=again.count_GQL)
        return state

    def _over(
        self, operands: list[Tensor], id_QL: Array, reference: _Reference | None, state: _State, wanted: int
    ) -> None:
        lanes, weight_VD = id_QL.shape[1], self.head.weight_VD
        tiles = tuple(np.empty((TILE, lanes), np.float32) for _ in range(3))
        scratch_SL = np.empty((4, lanes), np.float32)
        norm_2L = (reference.norm_2L if reference else np.empty((2, 0))).astype(np.float32)
        at_G = np.array([operand.data_ptr() for operand in operands])
        for first in range(0, self.head.vocab_size, STRIDE):
            weight_ND = self.product.weights(weight_VD[first : first + STRIDE])
            bias_N = self._bias(slice(first, first + STRIDE))
            n, width = weight_ND.shape
            if self.product.address:
                weights = weight_ND.data_ptr(), weight_ND.element_size() * width, n, width, first
                at = reference.operand.data_ptr() if reference else 0
                room = tiles, scratch_SL, id_QL, state.arrays
                low = int(weight_ND.dtype == torch.bfloat16)
                tile.walk(self.product.address, low, *weights, at_G, at, norm_2L, bias_N, *self._steps, *room, wanted)
                continue
            for start in range(0, n, TILE):
                stop = min(start + TILE, n)
                z_NL, final_NL, p_NL = (one[: stop - start] for one in tiles)
                part = weight_ND[start:stop], bias_N[start:stop]
                if reference:
                    self._logits(final_NL, *part, reference.operand)
                    tile.probabilities(final_NL, norm_2L, p_NL)
                for g, operand in enumerate(operands):
                    self._logits(z_NL, *part, operand)
                    s = [array[g] for array in state.arrays]
                    tile.absorb(z_NL, first + start, *s[:4], id_QL, *s[4:], scratch_SL, final_NL, p_NL, wanted)
        self.product.release()

    def _asked(self, operand: Tensor, id_QL: Array) -> Array:
        """Compute the logits of the tokens asked for, by the same product."""
        found = np.empty(id_QL.shape, np.float32)
        for q, id_L in enumerate(id_QL):
            ids = np.maximum(id_L, 0)
            shared = bool((ids == ids[0]).all())
            chosen = torch.from_numpy(ids[:1] if shared else ids)
            out_NL = np.empty((len(chosen), len(ids)), np.float32)
            self._logits(out_NL, self.product.weights(self.head.weight_VD[chosen]), self._bias(chosen), operand)
            found[q] = out_NL[0] if shared else out_NL.diagonal()
        return found

    def _logits(self, out_NL: Array, weight_ND: Tensor, bias_N: Array, operand: Tensor) -> None:
        self.product.into(torch.from_numpy(out_NL), weight_ND, operand)
        tile.arithmetic(out_NL, bias_N, *self._steps)

    def _bias(self, tokens: slice | Tensor) -> Array:
        return _NO_BIAS if self.head.bias_V is None else self.head.bias_V[tokens].numpy()

    @property
    def _steps(self) -> tuple[float, ...]:
        return tuple(math.nan if step is None else step for step in self.head.arithmetic.as_dict().values())


_NO_BIAS = np.empty(0, np.float32)


def _lanes(values: Array, share: int, empty: int) -> Array:
    """Lay out what belongs to rows, [..., R], for lanes of `share` places."""
    tiled = np.tile(values, share)
    return np.pad(tiled, [(0, 0)] * (values.ndim - 1) + [(0, -tiled.shape[-1] % GRAIN)], constant_values=empty)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of rows and what is asked of them: the arguments of `read_rows`."""

    walk: _Walk
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
        final, norm_2R = self.final if self.walk.wanted & _DIVERGENCES else None, np.empty((2, 0))
        if final is not None:
            id_QL = _lanes(id_QR, 1, -1)
            state = self.walk.read([self._operand([final], rows)], id_QL, None)
            norm_2R = state.norms[0, :, :n_rows]
            if final in left:
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
                reference = _Reference(self._operand([final] * share, rows), _lanes(norm_2R, share, 0))
            state = self.walk.read(operands, id_QL, reference)
            for g, group in enumerate(groups):
                lanes = self._measures(state, g, id_QL, reference.norm_2L if reference else None)
                for i, place in enumerate(group):
                    found[place] = {name: v[i * n_rows : (i + 1) * n_rows] for name, v in lanes.items()}
        return {name: np.stack([found[place][name] for place in sorted(found)]) for name in found[places.start]}

    def _operand(self, places: list[int], rows: slice) -> Tensor:
        """Lay out the states of some places side by side, filled up with zeros to a multiple of GRAIN."""
        state_LD = self.normed_PRD[places, rows].flatten(0, 1)
        return self.walk.product.lay_out(pad(state_LD, (0, 0, 0, -len(state_LD) % GRAIN)))

    def _ids(self, rows: slice) -> Array:
        """Tokens asked for: those of each row, then the tracked ones; [Q, R]."""
        own = [ids[rows].numpy() for ids in self.asked.values()]
        n_rows = rows.stop - rows.start
        tracked = self.request.tracked if "tracked" in self.request.measures else ()
        return np.array([*own, *([token] * n_rows for token in tracked)], np.int64).reshape(-1, n_rows)

    def _measures(self, state: _State, g: int, id_QL: Array, final_norm_2L: Array | None) -> dict[str, Array]:
        """Turn the state of operand g into the variables asked for: [L, ...]."""
        measures, sum_SL, lse_L = self.request.measures, state.sum_GSL[g], state.norms[g].sum(axis=0)
        found: dict[str, Array] = {}
        if "topk" in measures:
            best_LK, id_LK = state.best_GLK[g], state.best_id_GLK[g]
            order = np.lexsort((id_LK, -best_LK))
            found["topk_logit"], found["topk_id"] = (np.take_along_axis(x, order, axis=1) for x in (best_LK, id_LK))
        logit_LQ = np.where(id_QL < 0, np.float32(math.nan), state.seen_GQL[g]).T
        rank_LQ = np.where(id_QL < 0, np.int32(-1), state.count_GQL[g]).T
        for q, name in enumerate(self.asked):
            found[f"{name}_logit"], found[f"{name}_rank"] = logit_LQ[:, q], rank_LQ[:, q]
        if "tracked" in measures:
            at = len(self.asked)
            found["tracked_logit"], found["tracked_rank"] = logit_LQ[:, at:], rank_LQ[:, at:]
        with np.errstate(all="ignore"):  # broken rows, which are marked below
            if "logsumexp" in measures:
                found["logsumexp"] = lse_L
            if "entropy" in measures:
                found["entropy"] = np.log(sum_SL[0]) - sum_SL[1] / sum_SL[0]
            if "kl_final" in measures and final_norm_2L is not None:
                final_lse_L = final_norm_2L.sum(axis=0)
                # A divergence is not negative; rounding may leave it a hair below zero.
                found["kl_final"] = np.maximum(sum_SL[5] + (lse_L - final_lse_L), 0)
                found["kl_final"][~np.isfinite(final_lse_L)] = math.nan
            if "logprob" in measures:
                for name in [name for name in found if name.endswith("_logit")]:
                    norm_2L = state.norms[g].reshape(2, -1, *[1] * (found[name].ndim - 1))
                    found[name.replace("_logit", "_logprob")] = (found[name] - norm_2L[0]) - norm_2L[1]
        broken_L = ~np.isfinite(state.largest_GL[g]) | (state.nans_GL[g] > 0)
        for name, values in found.items():
            kept = values.astype(np.int32 if values.dtype.kind == "i" else np.float32)
            kept[broken_L] = -1 if kept.dtype.kind == "i" else math.nan
            found[name] = kept
        return found
