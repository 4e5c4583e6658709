"""Gate: the proof that Unembed(last state) is the model's own logits, before anything is captured.

Two comparisons on one probe sequence. The plain one reads the last block's output and compares with the model's
logits. The amplified one multiplies the unembedding's output by a factor that makes logits large, inside the model
and in our arithmetic alike: a softcap or any other bend that small logits do not show cannot hide there.
Difference: max |ours - theirs| / max |theirs|.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lenspipe.errors import GateError
from lenspipe.kernels.readout import Arithmetic

TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}
"""Largest difference that passes. Half-precision models round their own logits to 8 or 11 bits; we do not."""

AMPLITUDE = 100.0
"""Standard deviation of the amplified logits: beyond any softcap in use (30 to 50)."""


@dataclass(frozen=True, slots=True)
class GateFigures:
    """What the gate measured.

    Attributes:
        difference, amplified_difference: relative to the largest logit.
        tolerance: what both had to stay within.
        dtype: the model's.
        arithmetic: what was found between unembedding and logits.
        chain: classes of the modules between last block and unembedding.
    """

    difference: float
    amplified_difference: float
    tolerance: float
    dtype: str
    arithmetic: str
    chain: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a manifest."""
        return {**asdict(self), "chain": list(self.chain)}


def prove(
    model: Any,
    head_module: torch.nn.Module,
    candidates: Sequence[Arithmetic],
    raw_logits: Callable[[Tensor], Tensor],
    last_state: Callable[[Tensor], Tensor],
    ids: Tensor,
    chain: tuple[str, ...],
) -> tuple[Arithmetic, GateFigures]:
    """Find the arithmetic with which our logits are the model's, or refuse.

    Args:
        model: the transformers model.
        head_module: its unembedding.
        candidates: what its config may mean.
        raw_logits: residual -> float32 logits without the family's arithmetic, flattened to rows.
        last_state: ids -> the last block's output.
        ids: the probe, int64 [1, length].
        chain: for the figures.

    Raises:
        GateError: no candidate passes; says what differed and by how much.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in TOLERANCE:
        raise GateError(f"the model computes in {dtype}; the gate knows {', '.join(TOLERANCE)}: set model.dtype")
    theirs = _logits(model, ids)
    ours = raw_logits(last_state(ids))
    # Outputs of the head itself, so that the amplified comparison looks at the arithmetic alone.
    factor = AMPLITUDE / float(ours.std())
    seen: list[Tensor] = []

    def amplify(_module: Any, _args: Any, output: Tensor) -> Tensor:
        seen.append(output * factor)
        return seen[-1]

    handle = head_module.register_forward_hook(amplify)
    try:
        theirs_large = _logits(model, ids)
    finally:
        handle.remove()
    ours_large = seen[-1].float().reshape(-1, seen[-1].shape[-1])
    tried = []
    for arithmetic in candidates:
        figures = GateFigures(
            difference=_difference(arithmetic.apply_(ours.clone()), theirs),
            amplified_difference=_difference(arithmetic.apply_(ours_large.clone()), theirs_large),
            tolerance=TOLERANCE[dtype],
            dtype=dtype,
            arithmetic=str(arithmetic),
            chain=chain,
        )
        if max(figures.difference, figures.amplified_difference) <= figures.tolerance:
            return arithmetic, figures
        tried.append(figures)
    raise GateError(_refusal(type(model).__name__, tried))


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits.float().reshape(-1, logits.shape[-1])


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if difference == difference else float("inf")  # NaN never passes


def _refusal(name: str, tried: Sequence[GateFigures]) -> str:
    findings = [
        f"  with {' -> '.join(found.chain) or 'no final norm'} -> unembedding -> arithmetic {found.arithmetic}: "
        f"logits differ by {found.difference:.2g} of the largest, amplified logits by "
        f"{found.amplified_difference:.2g}; expected at most {found.tolerance:g} ({found.dtype})"
        for found in tried
    ]
    return "\n".join(
        [
            f"the lens of the last state is not the logits of {name}, so every readout would be wrong; refused.",
            *findings,
            "The model does something after its last block that lenspipe does not know; please report the model.",
        ]
    )
