"""CUDA walk: a block's way over the vocabulary on a GPU, tile by tile, and what its states have come to on it.

P places, R rows, S states (P times R: a row has a state at every place), D width, V vocabulary, K top-k, Q tokens asked
for, N tokens of a tile, C room for what is collected. Everything stays on the device; one tile of S x N logits exists.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lenspipe.kernels import cuda_tile, plain
from lenspipe.kernels.head import Head

TILE = 8192
"""Tokens of the vocabulary that are multiplied at once; a power of two."""

WARPS = 32
"""Warps of a program that takes in a tile: so many that a state's part of it stays in registers."""

AS_WRITTEN = {"enable_fp_fusion": False}
"""Every step is rounded by itself, whatever Triton's own default."""

NEAR_ROOM = 32
"""Room for logits that are near one asked for."""

TOP_ROOM = 128
"""Room for a tile's entrants to the top-k, or four times k where that is more."""

MARGIN = 2.0**-20
"""How far apart two products of the same vectors may be, in lengths of the two multiplied: 16 roundings."""

SUMS = frozenset({"SUMS", "MOMENTS", "DIVERGENCE", "REVERSE"})
"""What `cuda_tile.absorb` may be asked to add up."""


def multiplies_low(weight: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether operands are multiplied as they are: their products are exact in float32, and are added there."""
    low = weight.dtype == dtype and dtype in {torch.bfloat16, torch.float16}
    return low and weight.is_cuda and hasattr(torch.ops.aten.mm, "dtype")  # since torch 2.8


@dataclass(frozen=True, slots=True)
class State:
    """What has been found of S states: arrays as `cuda_tile.absorb` takes them, and the top-k so far, in order."""

    largest_S: Tensor
    nans_S: Tensor
    final_largest_S: Tensor
    sum_XS: Tensor
    low_QS: Tensor
    high_QS: Tensor
    seen_QS: Tensor
    count_QS: Tensor
    near_QSC: Tensor
    n_near_QS: Tensor
    best_SK: Tensor
    best_id_SK: Tensor

    @classmethod
    def empty(cls, low_QS: Tensor, high_QS: Tensor) -> "State":
        """Begin, with the logits asked for known to lie between two."""
        (n_asked, n_states), device = low_QS.shape, low_QS.device
        return cls(
            largest_S=torch.full((n_states,), -math.inf, device=device),
            nans_S=torch.zeros(n_states, dtype=torch.int32, device=device),
            final_largest_S=torch.full((n_states,), -math.inf, device=device),
            sum_XS=torch.zeros(cuda_tile.N_SUMS, n_states, dtype=torch.float64, device=device),
            low_QS=low_QS,
            high_QS=high_QS,
            seen_QS=low_QS.clone(),
            count_QS=torch.zeros(n_asked, n_states, dtype=torch.int32, device=device),
            near_QSC=torch.full((n_asked, n_states, NEAR_ROOM), -math.inf, device=device),
            n_near_QS=torch.zeros(n_asked, n_states, dtype=torch.int32, device=device),
            best_SK=torch.empty(n_states, 0, device=device),
            best_id_SK=torch.empty(n_states, 0, dtype=torch.int32, device=device),
        )

    @property
    def norms(self) -> Tensor:
        """Logsumexp in two parts, float64 [2, S]: the largest logit, and what is above it."""
        return torch.stack([self.largest_S.double(), self.sum_XS[0].log()])

    @property
    def broken(self) -> Tensor:
        """Whether a state's logits hold NaN or +inf, or nothing but -inf: bool [S]."""
        return ~torch.isfinite(self.largest_S) | (self.nans_S > 0)

    @property
    def ranks(self) -> Tensor:
        """Count the logits larger than each one asked for: [Q, S]."""
        return self.count_QS + (self.near_QSC > self.seen_QS[..., None]).sum(dim=2)

    @property
    def miscounted(self) -> Tensor:
        """Whether a logit asked for is not where it was expected, or more are near it than were kept: bool [Q, S]."""
        between_QS = (self.low_QS <= self.seen_QS) & (self.seen_QS <= self.high_QS)
        return ~(between_QS & (self.n_near_QS <= NEAR_ROOM) | self.broken)

    def with_entrants(self, value_SC: Tensor, id_SC: Tensor, k: int) -> "State":
        """Let logits into the top-k: they stand in the order of their ids, and all ids in it are lower."""
        # A stable sort leaves equal logits in the order of their ids.
        value_SC, id_SC = torch.cat([self.best_SK, value_SC], dim=1), torch.cat([self.best_id_SK, id_SC], dim=1)
        value_SC, order_SC = value_SC.sort(dim=1, descending=True, stable=True)
        return replace(self, best_SK=value_SC[:, :k], best_id_SK=id_SC.gather(1, order_SC[:, :k]))


@dataclass(frozen=True, slots=True)
class Walk:
    """The states of a block, on their way over the vocabulary.

    Attributes:
        normed_SD: place by place.
        final: which place holds the last layer.
    """

    head: Head
    normed_SD: Tensor
    n_rows: int
    final: int | None

    def read(self, id_QR: Tensor, k: int, wanted: frozenset[str]) -> State:
        """Find the k largest logits, the logits asked for and their ranks, and the sums that are wanted.

        A tile is expected to bring few tokens into the top-k, and few logits to be so near one asked for that rounding
        may decide their order. Both are counted, and where one is otherwise, all tiles are walked again without it.
        """
        state, lost_S = self._over(State.empty(*self._between(id_QR)), id_QR, k, wanted)
        if k and bool(lost_S.any()):
            nothing = state.low_QS[:0]
            sure, _ = self._over(State.empty(nothing, nothing), id_QR[:0], k, frozenset(), by_sorting=True)
            state = replace(state, best_SK=sure.best_SK, best_id_SK=sure.best_id_SK)
        if len(id_QR) and bool((state.miscounted & (self.by_state(id_QR) >= 0)).any()):
            again, _ = self._over(State.empty(state.seen_QS, state.seen_QS), id_QR, 0, frozenset())
            state = replace(state, count_QS=again.count_QS, near_QSC=again.near_QSC)
        return state

    def by_state(self, values: Tensor) -> Tensor:
        """Repeat what belongs to rows, [..., R], for their states at every place: [..., S]."""
        return values.repeat(*[1] * (values.ndim - 1), len(self.normed_SD) // self.n_rows)

    def add_shannon(self, state: State) -> None:
        """Add up the Jensen-Shannon divergence, for which logsumexp must be known: a walk of its own."""
        norm_2S = state.norms.float()
        for _, z_SN in self._tiles():
            cuda_tile.shannon[(len(z_SN),)](
                z_SN, z_SN.shape[1], self.n_rows, self._final_row, norm_2S, state.sum_XS,
                BLOCK=self._block, num_warps=WARPS, **AS_WRITTEN,
            )  # fmt: skip

    def mass(self, tokens: tuple[int, ...], norm_2S: Tensor) -> Tensor:
        """Add up the probabilities of a set of tokens: float64 [S]."""
        mass_S = norm_2S.new_zeros(len(self.normed_SD))
        for start in range(0, len(tokens), TILE):
            z_SN = self._logits(torch.tensor(tokens[start : start + TILE], device=mass_S.device)).double()
            mass_S += ((z_SN - norm_2S[0, :, None]) - norm_2S[1, :, None]).exp().sum(dim=1)
        return mass_S

    def _over(
        self, state: State, id_QR: Tensor, k: int, wanted: frozenset[str], by_sorting: bool = False
    ) -> tuple[State, Tensor]:
        """Take in tile after tile; tell beside it which states may have lost tokens of their top-k."""
        n_states, device = len(self.normed_SD), self.normed_SD.device
        room = max(TOP_ROOM, _power_of_two(4 * k)) if k else 0
        entrant_SC = torch.empty(n_states, room, device=device)
        entrant_id_SC = torch.zeros(n_states, room, dtype=torch.int32, device=device)
        n_entrants_S, most_S = torch.zeros(2, n_states, dtype=torch.int32, device=device)
        for first, z_SN in self._tiles():
            full = k > 0 and state.best_SK.shape[1] == k and not by_sorting
            least_S = state.best_SK[:, -1].contiguous() if full else state.largest_S
            cuda_tile.absorb[(n_states,)](
                z_SN, z_SN.shape[1], first, self.n_rows, self._final_row,
                state.largest_S, state.nans_S, state.final_largest_S, state.sum_XS,
                len(id_QR), id_QR, state.low_QS, state.high_QS, state.seen_QS, state.count_QS, state.near_QSC,
                state.n_near_QS, least_S, entrant_SC.fill_(-math.inf), entrant_id_SC, n_entrants_S,
                **{name: name in wanted for name in SUMS}, TOP=full,
                NEAR_ROOM=NEAR_ROOM, TOP_ROOM=room, BLOCK=self._block, num_warps=WARPS, **AS_WRITTEN,
            )  # fmt: skip
            if full:
                state = state.with_entrants(entrant_SC, entrant_id_SC, k)
                most_S = torch.maximum(most_S, n_entrants_S)
            elif k:
                value_SK, id_SK = plain.top_k(z_SN, min(k, z_SN.shape[1]))
                state = state.with_entrants(value_SK, id_SK + first, k)
        return state, most_S > room

    def _tiles(self) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, self.head.vocab_size, TILE):
            yield first, self._logits(slice(first, first + TILE))

    def _logits(self, tokens: slice | Tensor) -> Tensor:
        """Multiply, and apply what follows the product: [S, N]."""
        weight_ND, state_SD = self.head.weight_VD[tokens], self.normed_SD
        if multiplies_low(weight_ND, state_SD.dtype):
            z_SN = torch.mm(state_SD, weight_ND.T, out_dtype=torch.float32)
        else:
            z_SN = state_SD.float() @ weight_ND.float().T
        bias_N = None if self.head.bias_V is None else self.head.bias_V[tokens]
        steps = self.head.arithmetic.as_dict().values()
        if bias_N is not None or any(step is not None for step in steps):
            block = min(self._block, 1024)
            grid = len(z_SN), -(-z_SN.shape[1] // block)
            cuda_tile.arithmetic[grid](z_SN, z_SN.shape[1], bias_N, *steps, BLOCK=block, **AS_WRITTEN)
        return z_SN

    def _between(self, id_QR: Tensor) -> tuple[Tensor, Tensor]:
        """Find what the logits asked for lie between, by products of their own: [Q, S] twice."""
        state_PRD = self.normed_SD.reshape(-1, self.n_rows, self.normed_SD.shape[1]).float()
        norm_PR = state_PRD.norm(dim=2)
        low_QS, high_QS = norm_PR.new_empty(2, len(id_QR), norm_PR.numel())
        for q, id_R in enumerate(id_QR.clamp(min=0)):
            weight_RD = self.head.weight_VD[id_R].float()
            product_PR = torch.einsum("prd,rd->pr", state_PRD, weight_RD)
            margin_PR = MARGIN * norm_PR * weight_RD.norm(dim=1)
            ends_2PR = torch.stack([product_PR - margin_PR, product_PR + margin_PR])
            if self.head.bias_V is not None:
                ends_2PR += self.head.bias_V[id_R]
            ends_2PR = self.head.arithmetic.apply_(ends_2PR)
            more_2PR = (MARGIN * ends_2PR.abs()).nan_to_num_(posinf=0)
            low_QS[q] = (ends_2PR - more_2PR).amin(dim=0).flatten()
            high_QS[q] = (ends_2PR + more_2PR).amax(dim=0).flatten()
        return low_QS, high_QS

    @property
    def _final_row(self) -> int:
        return (self.final or 0) * self.n_rows

    @property
    def _block(self) -> int:
        return min(TILE, _power_of_two(self.head.vocab_size))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
