"""Walk: one thread's way over the vocabulary, tile by tile, and what its lanes have come to on it.

G operands of L lanes (states that are multiplied and read side by side), Q tokens asked for, K top-k, N tokens in a
tile.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lenspipe.kernels import tile
from lenspipe.kernels.head import TILE, Head
from lenspipe.kernels.product import Product

Array = np.ndarray[Any, Any]

STRIDE = 16 * TILE
"""Tokens whose weights are prepared at once."""

FINAL_SUMS = tile.DIVERGENCE | tile.REVERSE | tile.SHANNON
"""Sums that need the last layer beside the one that is read."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The last layer at an operand's lanes: laid out, and its logsumexp in two parts, as `State.norms`."""

    operand: Tensor
    norm_2L: Array


@dataclass(frozen=True, slots=True)
class State:
    """What G operands of L lanes have come to; arrays as `tile.absorb` takes them, with G in front."""

    largest_GL: Array
    nans_GL: Array
    best_GLK: Array
    best_id_GLK: Array
    asked_GQL: Array
    seen_GQL: Array
    count_GQL: Array
    sum_GSL: Array
    norm_G2L: Array
    mass_GML: Array

    @classmethod
    def empty(cls, asked_GQL: Array, k: int, n_sets: int = 0) -> "State":
        """Begin, with the logits asked for as they are known so far."""
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
            norm_G2L=np.zeros((n, 2, lanes), np.float32),
            mass_GML=np.zeros((n, n_sets, lanes)),
        )

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Those of `tile.absorb`, in order."""
        return tuple(getattr(self, name) for name in self.__slots__ if name != "mass_GML")

    @property
    def norms(self) -> Array:
        """Logsumexp in two parts, [G, 2, L]: the largest logit, and what is above it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.stack([self.largest_GL, np.log(self.sum_GSL[:, 0])], axis=1)

    def best(self, g: int) -> tuple[Array, Array]:
        """Sort the heap of operand g: logits [L, K] and ids, the best first."""
        best_LK, id_LK = self.best_GLK[g], self.best_id_GLK[g]
        order = np.lexsort((id_LK, -best_LK))
        return np.take_along_axis(best_LK, order, axis=1), np.take_along_axis(id_LK, order, axis=1)

    @property
    def broken(self) -> Array:
        """Whether a lane's logits hold NaN or +inf, or nothing but -inf: bool [G, L]."""
        return ~np.isfinite(self.largest_GL) | (self.nans_GL > 0)

    def counted_by_another(self) -> bool:
        """Tell whether a logit asked for has rounded otherwise in its tile than in the product that gave it before."""
        same = (self.seen_GQL == self.asked_GQL) | (np.isnan(self.seen_GQL) & np.isnan(self.asked_GQL))
        return not bool(same.all())


@dataclass(frozen=True, slots=True)
class Walk:
    """One way over the vocabulary: the same for all panels of a block."""

    head: Head
    product: Product
    k: int
    wanted: int
    sets: tuple[tuple[int, ...], ...]

    def read(self, operands: list[Tensor], id_QL: Array, reference: Reference | None) -> State:
        """Read operands of L lanes each, all asked for the same tokens."""
        state = State.empty(np.stack([self._asked(operand, id_QL) for operand in operands]), self.k, len(self.sets))
        wanted = self.wanted if reference else self.wanted & ~FINAL_SUMS
        self._over(operands, id_QL, reference, state, wanted & ~tile.SHANNON)
        if wanted & tile.SHANNON:
            state.norm_G2L[:] = state.norms
            self._over(operands, id_QL, reference, state, tile.SHANNON)
        if state.counted_by_another():
            again = State.empty(state.seen_GQL, 0)
            self._over(operands, id_QL, None, again, 0)
            if again.counted_by_another():
                raise ArithmeticError(f"{self.product.way}: one product gave two results for the same operands")
            state = replace(state, asked_GQL=again.asked_GQL, count_GQL=again.count_GQL)
        for m, tokens in enumerate(self.sets):
            self._add_mass(operands, torch.tensor(tokens), state, m)
        return state

    def _add_mass(self, operands: list[Tensor], tokens: Tensor, state: State, m: int) -> None:
        """Add up the probabilities of a set of tokens."""
        norm_G2L = state.norms.astype(np.float32)
        for start in range(0, len(tokens), TILE):
            chosen = tokens[start : start + TILE]
            weight_ND, bias_N = self.product.weights(self.head.weight_VD[chosen]), self._bias(chosen)
            z_NL = np.empty((len(chosen), norm_G2L.shape[2]), np.float32)
            for g, operand in enumerate(operands):
                self._logits(z_NL, weight_ND, bias_N, operand)
                tile.probabilities(z_NL, norm_G2L[g], z_NL)
                with np.errstate(invalid="ignore"):  # broken lanes
                    state.mass_GML[g, m] += z_NL.sum(axis=0, dtype=np.float64)

    def _over(
        self, operands: list[Tensor], id_QL: Array, reference: Reference | None, state: State, wanted: int
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
