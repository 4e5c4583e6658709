"""Readout: the measures of a block of states: fused on a CPU or a GPU, plain elsewhere, with the same numbers.

Shapes: P places (states of the same rows at different sites), R rows, D width, V vocabulary, K top-k, T tracked tokens.
Mathematics on arrays only: no files, no model names.
"""

from collections.abc import Mapping
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from lenspipe.errors import RequestError
from lenspipe.kernels import plain
from lenspipe.kernels.head import Head, Request
from lenspipe.variables import AGAINST_FINAL


@cache
def _fused() -> ModuleType:
    try:
        from lenspipe.kernels import fused  # noqa: PLC0415 -- numba takes a second to import, and may be absent
    except ImportError:
        return plain
    return fused


@cache
def _cuda() -> ModuleType:
    try:
        from lenspipe.kernels import cuda  # noqa: PLC0415 -- Triton comes with torch where that is made for CUDA
    except ImportError:
        return plain
    return cuda


def way_of(device: torch.device) -> ModuleType:
    """The module that reads on this device: its `read_rows`, `row_bytes` and `way`."""
    return {"cpu": _fused, "cuda": _cuda}.get(device.type, lambda: plain)()


def rows_per_block(
    budget: int, head: Head, n_states: int, setting: str = "run.memory", by: ModuleType | None = None
) -> int:
    """Count the rows to read at once: as many as read fastest, and no more than the budget allows.

    Args:
        budget: bytes.
        head: the unembedding.
        n_states: states of one row that are held while reading.
        setting: what the budget is called where it was set.
        by: the module that reads; by default that of the unembedding's device.

    Raises:
        RequestError: the budget does not hold one row.
    """
    row: int
    row, most = (by or way_of(head.weight_VD.device)).row_bytes(head, n_states)
    if budget < row:
        raise RequestError(f"{setting} is {budget} bytes, but one row takes {row}: allow more")
    return min(budget // row, int(most))


def way(head: Head, dtype: torch.dtype) -> str:
    """Name how states of this dtype are read and multiplied, as in `fused, oneDNN bfloat16`."""
    chosen = way_of(head.weight_VD.device)
    return f"{chosen.__name__.rpartition('.')[2]}, {chosen.way(head, dtype)}"


def read_rows(
    head: Head, normed_PRD: Tensor, request: Request, asked: Mapping[str, Tensor], final: int | None = None
) -> dict[str, Tensor]:
    """Compute the measures of a block of rows.

    Args:
        head: the unembedding.
        normed_PRD: states after the final norm.
        request: which measures.
        asked: tokens whose logit and rank are wanted, by name (`target`, `answer`): int64 [R], -1 where there is none
            (rank -1, logit NaN).
        final: which place holds the last layer, for the measures of variables.AGAINST_FINAL.

    Returns:
        One tensor [P, R, ...] per variable of variables.py that the measures bring. A row whose logits hold NaN
        or +inf has rank -1, id -1 and NaN throughout.
    """
    if final is None and (needs := request.measures & AGAINST_FINAL):
        raise ValueError(f"{', '.join(sorted(needs))} needs the last layer's states")
    found: dict[str, Tensor] = way_of(normed_PRD.device).read_rows(head, normed_PRD, request, asked, final)
    return found
