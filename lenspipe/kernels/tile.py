"""Tile: one pass over a tile of logits while it is in cache, compiled.

N tokens, L lanes (rows read side by side, so that a vector instruction serves many), K top-k, Q tokens asked for.
Sums are float32 within a tile and float64 from tile to tile. Every function is compiled at its first call, kept
between processes, and runs without the interpreter's lock.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Array = np.ndarray[Any, Any]

SUB = 32
"""Tokens that are searched one by one where a lane's largest of them enters its top-k."""

SUMS, MOMENTS, DIVERGENCE, REVERSE, SHANNON = 1, 2, 4, 8, 16
"""What `absorb` may be asked to add up."""

N_SUMS, RELATIVE = 7, 5
"""Sums, and those of them, the first, that are relative to the largest logit so far."""

NO_TOKEN = 2**31 - 1
"""In place of the id where the top-k is not full yet."""

_compiled: Any = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
_inlined: Any = njit(nogil=True, error_model="numpy", fastmath={"contract"}, inline="always")

# exp(x) = 2**n * exp(f), f = x - n log(2) with log(2) in two parts; the polynomial is that of Cephes' expf (Moshier).
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(1.5 * 2**23)  # added and taken off again, it rounds to a whole number
_TINY = np.float32(1e-37)
_LOWEST = np.float32(-87.0)  # exp of less is 0 here: at most 2e-38 of the largest term


@_inlined
def _exp(x: Any) -> Any:
    n = (x * _LOG2E + _ROUND) - _ROUND
    f = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1.0)
    return p * np.int32((np.int32(n) + 127) << 23).view(np.float32)


@_inlined
def _above(x: Any) -> Any:
    """Bound x from below and give exp(x) beside it: exactly 0 there."""
    low = x < _LOWEST
    bounded = _LOWEST if low else x
    return bounded, np.float32(0) if low else _exp(bounded)


@_inlined
def _log(x: Any) -> Any:
    """Of a number above 0; Cephes' logf: x = 2**n * (1 + f), 1 + f near 1."""
    bits = np.float32(x).view(np.int32)
    n = np.float32(((bits >> 23) & 255) - 126)
    f = np.int32((bits & 0x7FFFFF) | 0x3F000000).view(np.float32)
    low = f < np.float32(0.707106781)
    n = n - np.float32(1) if low else n
    f = (f + f if low else f) - np.float32(1)
    square = f * f
    p = np.float32(7.0376836292e-2)
    p = p * f - np.float32(1.1514610310e-1)
    p = p * f + np.float32(1.1676998740e-1)
    p = p * f - np.float32(1.2420140846e-1)
    p = p * f + np.float32(1.4249322787e-1)
    p = p * f - np.float32(1.6668057665e-1)
    p = p * f + np.float32(2.0000714765e-1)
    p = p * f - np.float32(2.4999993993e-1)
    p = p * f + np.float32(3.3333331174e-1)
    return n * _LN2_HIGH + (f + (p * f * square + n * _LN2_LOW - np.float32(0.5) * square))


@_inlined
def _tanh(x: Any) -> Any:
    size = abs(x)
    square = x * x
    p = np.float32(-5.70498872745e-3)  # Cephes' tanhf, below 0.625
    p = p * square + np.float32(2.06390887954e-2)
    p = p * square - np.float32(5.37397155531e-2)
    p = p * square + np.float32(1.33314422036e-1)
    p = p * square - np.float32(3.33332819422e-1)
    near = p * square * x + x
    far = np.float32(1.0) - np.float32(2.0) / (_exp(min(size + size, np.float32(40.0))) + np.float32(1.0))
    far = far if x > 0 else -far
    return x if x != x else (near if size < np.float32(0.625) else far)


@_compiled
def arithmetic(z_NL: Array, bias_N: Array, multiply: float, divide: float, softcap: float) -> None:
    """Turn products into logits, in place; an empty bias and a NaN stand for a step that is not taken."""
    n, lanes = z_NL.shape
    if len(bias_N):
        for v in range(n):
            z_L, bias = z_NL[v], bias_N[v]
            for r in range(lanes):
                z_L[r] += bias
    if multiply == multiply:
        factor = np.float32(multiply)
        for v in range(n):
            z_L = z_NL[v]
            for r in range(lanes):
                z_L[r] *= factor
    if divide == divide:
        divisor = np.float32(divide)
        for v in range(n):
            z_L = z_NL[v]
            for r in range(lanes):
                z_L[r] /= divisor
    if softcap == softcap:
        cap = np.float32(softcap)
        for v in range(n):
            z_L = z_NL[v]
            for r in range(lanes):
                z_L[r] = cap * _tanh(z_L[r] / cap)


@_compiled
def search(
    z_NL: Array, first: int, largest_L: Array, nans_L: Array, best_LK: Array, best_id_LK: Array, sub_L: Array
) -> None:
    """Update the largest logit, the count of NaN, and the heap of the top-k; `first` is the id of the tile's first."""
    n, lanes = z_NL.shape
    k = best_LK.shape[1]
    for start in range(0, n, SUB):
        stop = min(start + SUB, n)
        for r in range(lanes):
            sub_L[r] = -np.inf
        for v in range(start, stop):
            z_L = z_NL[v]
            for r in range(lanes):
                z = z_L[r]
                sub_L[r] = z if z > sub_L[r] else sub_L[r]
                nans_L[r] += z != z
        for r in range(lanes):
            largest_L[r] = sub_L[r] if sub_L[r] > largest_L[r] else largest_L[r]
            if k and (sub_L[r] > best_LK[r, 0] or best_id_LK[r, 0] == NO_TOKEN):
                for v in range(start, stop):
                    _enter(z_NL[v, r], first + v, best_LK[r], best_id_LK[r])


@_inlined
def _enter(z: Any, token: int, best_K: Array, id_K: Array) -> None:
    """Let a logit into a heap whose root is the worst: the smallest, and of equal ones that of the highest id."""
    if not (z > best_K[0] or (z == best_K[0] and token < id_K[0])):
        return
    k, at = len(best_K), 0
    while 2 * at + 1 < k:
        below = 2 * at + 1
        if below + 1 < k and (
            best_K[below + 1] < best_K[below] or (best_K[below + 1] == best_K[below] and id_K[below + 1] > id_K[below])
        ):
            below += 1
        if best_K[below] > z or (best_K[below] == z and id_K[below] < token):
            break
        best_K[at], id_K[at] = best_K[below], id_K[below]
        at = below
    best_K[at], id_K[at] = z, token


@_compiled
def count_larger(z_NL: Array, first: int, id_QL: Array, asked_QL: Array, seen_QL: Array, count_QL: Array) -> None:
    """Count the logits above each asked one, and note what the asked one is when it passes."""
    n, lanes = z_NL.shape
    for q in range(len(id_QL)):
        asked_L, count_L, id_L, seen_L = asked_QL[q], count_QL[q], id_QL[q], seen_QL[q]
        for v in range(n):
            z_L = z_NL[v]
            for r in range(lanes):
                count_L[r] += z_L[r] > asked_L[r]
        for r in range(lanes):
            if first <= id_L[r] < first + n:
                seen_L[r] = z_NL[id_L[r] - first, r]


@_compiled
def rescale(before_L: Array, largest_L: Array, sum_SL: Array) -> None:
    """Make sums that were relative to the largest logit before the tile relative to the largest one now."""
    for r in range(len(before_L)):
        shift = np.float64(before_L[r]) - np.float64(largest_L[r])
        scale = np.exp(shift) if shift > -700.0 else 0.0
        if scale == 0.0:
            sum_SL[:RELATIVE, r] = 0.0
        elif scale != 1.0:
            sum_SL[2, r] = (sum_SL[2, r] + shift * (2.0 * sum_SL[1, r] + shift * sum_SL[0, r])) * scale
            sum_SL[1, r] = (sum_SL[1, r] + shift * sum_SL[0, r]) * scale
            sum_SL[0, r] *= scale
            sum_SL[3, r] *= scale * scale
            sum_SL[4, r] *= scale


@_compiled
def add_up(z_NL: Array, largest_L: Array, sum_SL: Array, part_SL: Array) -> None:
    """Add sums 0 and 1: of exp(x) and exp(x) x; x = z - the largest so far."""
    n, lanes = z_NL.shape
    part_SL[:2] = 0
    mass_L, first_L = part_SL[0], part_SL[1]
    for v in range(n):
        z_L = z_NL[v]
        for r in range(lanes):
            x, e = _above(z_L[r] - largest_L[r])
            mass_L[r] += e
            first_L[r] += e * x
    for r in range(lanes):
        sum_SL[0, r] += mass_L[r]
        sum_SL[1, r] += first_L[r]


@_compiled
def add_moments(z_NL: Array, largest_L: Array, sum_SL: Array, part_SL: Array) -> None:
    """Add sums 2 and 3: of exp(x) x x and exp(2 x)."""
    n, lanes = z_NL.shape
    part_SL[:2] = 0
    second_L, square_L = part_SL[0], part_SL[1]
    for v in range(n):
        z_L = z_NL[v]
        for r in range(lanes):
            x, e = _above(z_L[r] - largest_L[r])
            second_L[r] += e * x * x
            square_L[r] += e * e
    for r in range(lanes):
        sum_SL[2, r] += second_L[r]
        sum_SL[3, r] += square_L[r]


@_compiled
def probabilities(z_NL: Array, norm_2L: Array, p_NL: Array) -> None:
    """Write exp(z - logsumexp), the latter in two parts, the largest logit first: large ones then cost no digits."""
    n, lanes = z_NL.shape
    largest_L, above_L = norm_2L[0], norm_2L[1]
    for v in range(n):
        z_L, p_L = z_NL[v], p_NL[v]
        for r in range(lanes):
            p_L[r] = _above((z_L[r] - largest_L[r]) - above_L[r])[1]


@_compiled
def add_divergence(z_NL: Array, final_NL: Array, p_NL: Array, sum_SL: Array, part_SL: Array) -> None:
    """Add sum 5: of p_final (z_final - z), a token that the last layer rules out adding nothing."""
    n, lanes = z_NL.shape
    part_SL[0] = 0
    part_L = part_SL[0]
    for v in range(n):
        z_L, final_L, p_L = z_NL[v], final_NL[v], p_NL[v]
        for r in range(lanes):
            term = p_L[r] * (final_L[r] - z_L[r])
            part_L[r] += term if p_L[r] > 0 else np.float32(0)
    for r in range(lanes):
        sum_SL[5, r] += part_L[r]


@_compiled
def add_reverse(z_NL: Array, final_NL: Array, largest_L: Array, sum_SL: Array, part_SL: Array) -> None:
    """Add sum 4: of exp(x) (z - z_final), a token that this layer rules out adding nothing."""
    n, lanes = z_NL.shape
    part_SL[0] = 0
    part_L = part_SL[0]
    for v in range(n):
        z_L, final_L = z_NL[v], final_NL[v]
        for r in range(lanes):
            e = _above(z_L[r] - largest_L[r])[1]
            part_L[r] += e * (z_L[r] - final_L[r]) if e > 0 else np.float32(0)
    for r in range(lanes):
        sum_SL[4, r] += part_L[r]


@_compiled
def add_shannon(z_NL: Array, norm_2L: Array, p_NL: Array, sum_SL: Array, part_SL: Array) -> None:
    """Add sum 6, twice the Jensen-Shannon divergence of softmax(z), whose logsumexp is known, from p_final."""
    n, lanes = z_NL.shape
    largest_L, above_L, part_L = norm_2L[0], norm_2L[1], part_SL[0]
    part_L[:] = 0
    for v in range(n):
        z_L, p_L = z_NL[v], p_NL[v]
        for r in range(lanes):
            q = _above((z_L[r] - largest_L[r]) - above_L[r])[1]
            # With t = (q - p) / (q + p), twice the term is (q + p) / 2 of a function of t that is nowhere negative.
            both = q + p_L[r]
            some = both > _TINY
            t = abs(q - p_L[r]) / (both if some else np.float32(1))
            rest = np.float32(1) - t
            term = (np.float32(1) + t) * _log(np.float32(1) + t)
            term += rest * _log(rest if rest > _TINY else np.float32(1))
            part_L[r] += np.float32(0.5) * both * term if some else np.float32(0)
    for r in range(lanes):
        sum_SL[6, r] += part_L[r]


@_compiled
def absorb(
    z_NL: Array,
    first: int,
    largest_L: Array,
    nans_L: Array,
    best_LK: Array,
    best_id_LK: Array,
    id_QL: Array,
    asked_QL: Array,
    seen_QL: Array,
    count_QL: Array,
    sum_SL: Array,
    norm_2L: Array,
    scratch_SL: Array,
    final_NL: Array,
    p_NL: Array,
    wanted: int,
) -> None:
    """Take in one tile: all that is wanted of it; SHANNON stands alone, for a second walk.

    Args:
        z_NL: logits of tokens `first` to `first` + N.
        largest_L, nans_L, best_LK, best_id_LK: what has been found so far, as in `search`.
        id_QL, asked_QL, seen_QL, count_QL: as in `count_larger`.
        sum_SL: float64, N_SUMS sums.
        norm_2L: logsumexp in two parts, the largest logit first; known in a second walk.
        scratch_SL: float32, 4 rows.
        final_NL, p_NL: the last layer's logits and probabilities, where a divergence is wanted.
        wanted: flags.
    """
    if wanted & SHANNON:
        add_shannon(z_NL, norm_2L, p_NL, sum_SL, scratch_SL)
        return
    before_L = scratch_SL[2]
    before_L[:] = largest_L
    search(z_NL, first, largest_L, nans_L, best_LK, best_id_LK, scratch_SL[3])
    if len(id_QL):
        count_larger(z_NL, first, id_QL, asked_QL, seen_QL, count_QL)
    if wanted & SUMS:
        rescale(before_L, largest_L, sum_SL)
        add_up(z_NL, largest_L, sum_SL, scratch_SL)
    if wanted & MOMENTS:
        add_moments(z_NL, largest_L, sum_SL, scratch_SL)
    if wanted & DIVERGENCE:
        add_divergence(z_NL, final_NL, p_NL, sum_SL, scratch_SL)
    if wanted & REVERSE:
        add_reverse(z_NL, final_NL, largest_L, sum_SL, scratch_SL)


@intrinsic
def _multiply(  # type: ignore[no-untyped-def]
    typing, address, n, lanes, width, weight, laid_out, out, low
):
    """Call a micro-kernel of `product` by its address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        address, n, lanes, width, weight, laid_out, out, low = arguments
        function = builder.inttoptr(address, ir.FunctionType(ir.VoidType(), [word] * 11).as_pointer())
        nothing = ir.Constant(word, 0)
        builder.call(function, [n, lanes, width, width, lanes, lanes, nothing, weight, laid_out, out, low])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@_compiled
def walk(
    address: int,
    low: int,
    weight_at: int,
    row_bytes: int,
    n_tokens: int,
    width: int,
    first: int,
    operand_at_G: Array,
    reference_at: int,
    reference_norm_2L: Array,
    bias_N: Array,
    multiply: float,
    divide: float,
    softcap: float,
    tiles_NL: tuple[Array, Array, Array],
    scratch_SL: Array,
    id_QL: Array,
    state: tuple[Array, Array, Array, Array, Array, Array, Array, Array, Array],
    wanted: int,
) -> None:
    """Multiply and take in tile after tile of some tokens: `first` to `first` + n_tokens.

    Args:
        address: of the micro-kernel; `low` is 1 where it takes bfloat16.
        weight_at: address of the tokens' weights, each row_bytes apart.
        operand_at_G: addresses of the operands, laid out; all of L lanes.
        reference_at: address of the last layer's operand, 0 for none; reference_norm_2L is its logsumexp.
        bias_N, multiply, divide, softcap: as in `arithmetic`.
        tiles_NL: room for three tiles.
        state: largest_GL, nans_GL, best_GLK, best_id_GLK, asked_GQL, seen_GQL, count_GQL, sum_GSL, norm_G2L, as in
            `absorb`.
    """
    largest_GL, nans_GL, best_GLK, best_id_GLK, asked_GQL, seen_GQL, count_GQL, sum_GSL, norm_G2L = state
    size, lanes = tiles_NL[0].shape
    for start in range(0, n_tokens, size):
        n = min(size, n_tokens - start)
        z_NL, final_NL, p_NL = tiles_NL[0][:n], tiles_NL[1][:n], tiles_NL[2][:n]
        bias = bias_N[start : start + n]
        weights = weight_at + start * row_bytes
        if reference_at:
            _multiply(address, n, lanes, width, weights, reference_at, final_NL.ctypes.data, low)
            arithmetic(final_NL, bias, multiply, divide, softcap)
            probabilities(final_NL, reference_norm_2L, p_NL)
        for g in range(len(operand_at_G)):
            _multiply(address, n, lanes, width, weights, operand_at_G[g], z_NL.ctypes.data, low)
            arithmetic(z_NL, bias, multiply, divide, softcap)
            absorb(
                z_NL, first + start, largest_GL[g], nans_GL[g], best_GLK[g], best_id_GLK[g], id_QL, asked_GQL[g],
                seen_GQL[g], count_GQL[g], sum_GSL[g], norm_G2L[g], scratch_SL, final_NL, p_NL, wanted,
            )  # fmt: skip
