# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
"""CUDA tile: what is done to a tile of logits on a GPU, in one read of it, compiled by Triton.

S states (rows of the tile), N tokens of the tile, of which a program takes all of one state; Q tokens asked for, R rows
(tokens are asked for by row, and a row has a state at every place), C room for what is collected.
Sums are float32 within a tile and float64 from tile to tile. What has been found of a state is read and written by one
program only; it is loaded before some reduction and stored after it, where all warps meet, so that none overtakes.
"""

import triton
import triton.language as tl

N_SUMS = 7
"""Sums of a state, as `absorb` and `shannon` number them."""


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    square = x * x
    p = -5.70498872745e-3  # Cephes' tanhf, below 0.625
    p = p * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = p * square * x + x
    far = 1.0 - 2.0 / (tl.exp(tl.minimum(size + size, 40.0)) + 1.0)
    far = tl.where(x > 0, far, -far)
    return tl.where(x != x, x, tl.where(size < 0.625, near, far))


@triton.jit
def arithmetic(z_ptr, n, bias_ptr, multiply, divide, softcap, BLOCK: tl.constexpr):
    """Turn products z_SN into logits, in place; None stands for a step that is not taken."""
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < n
    at_ptr = z_ptr + tl.program_id(0).to(tl.int64) * n + token
    z = tl.load(at_ptr, mask=there, other=0.0)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + token, mask=there, other=0.0)
    if multiply is not None:
        z *= multiply
    if divide is not None:
        z /= divide
    if softcap is not None:
        z = softcap * _tanh(z / softcap)
    tl.store(at_ptr, z, mask=there)


@triton.jit
def _row(z_ptr, row, n, BLOCK: tl.constexpr):
    """Load one state's logits, NaN as they are, and -inf beyond the end."""
    token = tl.arange(0, BLOCK)
    return tl.load(z_ptr + row * n + token, mask=token < n, other=float("-inf"))


@triton.jit
def _scale(before, largest):
    """By how much sums relative to `before` shrink when they are relative to `largest`, and the difference."""
    some = before > float("-inf")
    shift = tl.where(some, before - largest, 0.0)
    return tl.where(some, tl.exp(shift), 0.0).to(tl.float64), shift.to(tl.float64)


@triton.jit
def _grown(sum_ptr, scale, terms):
    """Rescale a sum and add to it; what has shrunk to nothing is nothing, even of an infinite sum."""
    before = tl.load(sum_ptr)
    return tl.where(scale > 0, before * scale, 0.0) + tl.sum(terms, 0).to(tl.float64)


@triton.jit
def _collect(what, chosen, to_ptr, n_before, ROOM: tl.constexpr):
    """Write the chosen ones in order behind those already there, as far as there is room."""
    place = n_before + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(to_ptr + place, what, mask=chosen & (place < ROOM))


@triton.jit
def absorb(
    z_ptr, n, first, n_rows, final_row,
    largest_ptr, nans_ptr, final_largest_ptr, sum_ptr,
    n_asked, id_ptr, low_ptr, high_ptr, seen_ptr, count_ptr, near_ptr, n_near_ptr,
    least_ptr, entrant_ptr, entrant_id_ptr, n_entrants_ptr,
    SUMS: tl.constexpr, MOMENTS: tl.constexpr, DIVERGENCE: tl.constexpr, REVERSE: tl.constexpr, TOP: tl.constexpr,
    NEAR_ROOM: tl.constexpr, TOP_ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take in one tile.

    Args:
        z_ptr: logits [S, N] of tokens `first` to `first` + n.
        n_rows, final_row: R, and the first of the last layer's R states.
        largest_ptr, nans_ptr, final_largest_ptr: [S], so far: largest logit, count of NaN, last layer's largest logit.
        sum_ptr: float64 [N_SUMS, S]; with x = z - largest, of exp(x), exp(x) x, exp(x) x x, exp(2 x),
            exp(x) (z - z_final), exp(x_final) (z_final - z).
        id_ptr: int64 [Q, R], the tokens asked for.
        low_ptr, high_ptr: [Q, S], what the logit asked for is not below and not above.
        seen_ptr, count_ptr: [Q, S], the logit asked for where it passes, and the count of logits above `high`.
        near_ptr, n_near_ptr: [Q, S, C] and [Q, S], the logits from `low` to `high`, and how many there were.
        least_ptr: [S], the k-th largest logit of the tiles before.
        entrant_ptr, entrant_id_ptr, n_entrants_ptr: [S, C] twice, [S], logits above it and their tokens, by id.
    """
    row = tl.program_id(0).to(tl.int64)
    n_states = tl.num_programs(0).to(tl.int64)
    token = first + tl.arange(0, BLOCK)
    raw = _row(z_ptr, row, n, BLOCK)
    before = tl.load(largest_ptr + row)
    nans_before = tl.load(nans_ptr + row)
    z = tl.where(raw != raw, float("-inf"), raw)
    largest = tl.maximum(before, tl.max(z, 0))

    if TOP:
        higher = z > tl.load(least_ptr + row)
        n_higher = tl.sum(higher.to(tl.int32), 0)
        if n_higher > 0:
            _collect(z, higher, entrant_ptr + row * TOP_ROOM, 0, TOP_ROOM)
            _collect(token, higher, entrant_id_ptr + row * TOP_ROOM, 0, TOP_ROOM)
        tl.store(n_entrants_ptr + row, n_higher)

    for q in range(n_asked):
        at = q * n_states + row
        high = tl.load(high_ptr + at)
        near = (z >= tl.load(low_ptr + at)) & (z <= high)
        n_before = tl.load(n_near_ptr + at)
        count = tl.load(count_ptr + at) + tl.sum((z > high).to(tl.int32), 0)
        n_near = tl.sum(near.to(tl.int32), 0)
        if n_near > 0:
            _collect(z, near, near_ptr + at * NEAR_ROOM, n_before, NEAR_ROOM)
        asked = token == tl.load(id_ptr + q * n_rows + row % n_rows)
        tl.store(seen_ptr + at + token * 0, raw, mask=asked)
        tl.store(count_ptr + at, count)
        tl.store(n_near_ptr + at, n_before + n_near)

    if SUMS:
        own_ptr = sum_ptr + row
        scale, shift = _scale(before, largest)
        x = z - tl.where(largest > float("-inf"), largest, 0.0)
        e = tl.exp(x)
        x = tl.where(e > 0, x, 0.0)
        zeroth, once = tl.load(own_ptr), tl.load(own_ptr + n_states)
        mass = _grown(own_ptr, scale, e)
        mean = (once + shift * zeroth) * scale + tl.sum(e * x, 0).to(tl.float64)
        if MOMENTS:
            twice = tl.load(own_ptr + 2 * n_states) + shift * (2 * once + shift * zeroth)
            square = _grown(own_ptr + 3 * n_states, scale * scale, e * e)
            tl.store(own_ptr + 2 * n_states, twice * scale + tl.sum(e * x * x, 0).to(tl.float64))
            tl.store(own_ptr + 3 * n_states, square)
        if DIVERGENCE or REVERSE:
            final = _row(z_ptr, final_row + row % n_rows, n, BLOCK)
            final = tl.where(final != final, float("-inf"), final)
        if REVERSE:
            terms = tl.where(e > 0, e * (z - final), 0.0)
            tl.store(own_ptr + 4 * n_states, _grown(own_ptr + 4 * n_states, scale, terms))
        if DIVERGENCE:
            final_before = tl.load(final_largest_ptr + row)
            final_largest = tl.maximum(final_before, tl.max(final, 0))
            scale, shift = _scale(final_before, final_largest)
            p = tl.exp(final - tl.where(final_largest > float("-inf"), final_largest, 0.0))
            terms = tl.where(p > 0, p * (final - z), 0.0)
            tl.store(own_ptr + 5 * n_states, _grown(own_ptr + 5 * n_states, scale, terms))
            tl.store(final_largest_ptr + row, final_largest)
        tl.store(own_ptr, mass)
        tl.store(own_ptr + n_states, mean)

    nans = nans_before + tl.sum((raw != raw).to(tl.int32), 0)
    tl.store(nans_ptr + row, nans)
    tl.store(largest_ptr + row, largest)


@triton.jit
def shannon(z_ptr, n, n_rows, final_row, norm_ptr, sum_ptr, BLOCK: tl.constexpr):
    """Add sum 6, twice the Jensen-Shannon divergence from the last layer; logsumexp is known, in two parts [2, S]."""
    row = tl.program_id(0).to(tl.int64)
    n_states = tl.num_programs(0).to(tl.int64)
    before = tl.load(sum_ptr + 6 * n_states + row)
    final = final_row + row % n_rows
    q = tl.exp((_row(z_ptr, row, n, BLOCK) - tl.load(norm_ptr + row)) - tl.load(norm_ptr + n_states + row))
    p = tl.exp((_row(z_ptr, final, n, BLOCK) - tl.load(norm_ptr + final)) - tl.load(norm_ptr + n_states + final))
    # With t = (q - p) / (q + p), twice the term is (q + p) / 2 of a function of t that is nowhere negative.
    both = q + p
    some = both > 1e-37
    t = tl.where(some, tl.abs(q - p) / tl.where(some, both, 1.0), 0.0)
    rest = 1.0 - t
    terms = (1.0 + t) * tl.log(1.0 + t) + rest * tl.log(tl.where(rest > 1e-37, rest, 1.0))
    tl.store(sum_ptr + 6 * n_states + row, before + tl.sum(0.5 * both * terms, 0).to(tl.float64))
