"""Gate: the proof that Unembed reads the model's own logits, before anything is captured.

Comparisons on one probe sequence, each of logits, as max |ours - theirs| / max |theirs|:
- plain: the last block's output, read by us, against the model's logits.
- amplified: the unembedding's output is made large inside the model and in our arithmetic alike, so that a softcap
  or any other bend that small logits do not show cannot hide.
- middle: the model's later blocks are passed over; its logits must be our reading of the state in the middle.
Then two of states, as max |difference| / max |state|: earlier positions must not see later tokens, and a padded
sequence must be what it is alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lenspipe.errors import GateError, ModelError
from lenspipe.kernels.head import Arithmetic
from lenspipe.models.structure import Structure, run
from lenspipe.models.unembed import Unembed
from lenspipe.models.watching import simplest

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}
"""Largest difference of logits that passes. Half-precision models round their own at every step to 8 or 11 bits."""

DRIFT = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 5e-2}
"""Largest difference of states that other shapes of the same batch may make, over a whole model's depth."""

AMPLITUDE = 100.0
"""Standard deviation of the amplified logits: beyond any softcap in use (30 to 50)."""

SATURATION = 1e4
"""Factor at which a softcap shows its value; its square is the divisor at which it shows nothing."""


@dataclass(frozen=True, slots=True)
class GateFigures:
    """What the gate measured.

    Attributes:
        difference, amplified_difference, middle_difference: relative to the largest logit.
        tolerance: what they had to stay within.
        dtype: the model's.
        arithmetic: what was found between unembedding and logits.
        chain: classes of the modules between last block and unembedding.
        pads: whether padded sequences may share a batch; otherwise each is run alone.
    """

    difference: float
    amplified_difference: float
    middle_difference: float
    tolerance: float
    dtype: str
    arithmetic: str
    chain: tuple[str, ...]
    pads: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a manifest."""
        return {**asdict(self), "chain": list(self.chain)}


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def prove(
    model: Any, structure: Structure, raw: Unembed, candidates: Sequence[Arithmetic], ids: Tensor, measure: bool = True
) -> tuple[Arithmetic, GateFigures]:
    """Find the arithmetic with which our logits are the model's, or refuse.

    Args:
        model: the transformers model.
        structure: its parts, as conjectured.
        raw: its Unembed, without the family's arithmetic.
        candidates: what its config may mean.
        ids: the probe, int64 [1, length].
        measure: if no candidate passes, try what is measured.

    Raises:
        GateError: no arithmetic passes; says what differed and by how much.
        ModelError: earlier positions see later tokens.
    """
    dtype = str(structure.head.weight.dtype).removeprefix("torch.")
    probe = _Probe(model, structure, raw, ids)
    tried: list[GateFigures] = []
    for arithmetic in (*candidates, *(probe.measured(candidates) if measure else ())):
        plain, amplified, middle = (_difference(arithmetic.apply(ours), theirs) for ours, theirs in probe.pairs)
        chain = tuple(type(module).__name__ for module in structure.chain)
        figures = GateFigures(plain, amplified, middle, TOLERANCE[dtype], dtype, str(arithmetic), chain)
        if max(figures.difference, figures.amplified_difference, figures.middle_difference) <= figures.tolerance:
            _require_causal(model, structure, ids, TOLERANCE[dtype])
            pads = not _heeds_length(model.config) and _pads(model, structure, ids, DRIFT[dtype])
            return arithmetic, replace(figures, pads=pads)
        tried.append(figures)
    raise GateError(_refusal(type(model).__name__, tried))


class _Probe:
    """The pairs of logits to compare: ours without arithmetic, theirs."""

    def __init__(self, model: Any, structure: Structure, raw: Unembed, ids: Tensor) -> None:
        self.model, self.structure, self.raw, self.ids = model, structure, raw, ids
        with _last_state(structure) as last:
            theirs = _logits(model, ids)
        ours = _read_apart(raw, last[-1][0])
        self.factor = AMPLITUDE / max(float(ours.std()), 1e-30)
        middle = len(structure.blocks) // 2
        with _skipped(structure, middle) as states:
            theirs_middle = _logits(model, ids)
        ours_middle = _read_apart(raw, states[0][0])
        self.pairs = [(ours, theirs), self._amplified(self.factor), (ours_middle, theirs_middle)]

    def _amplified(self, factor: float) -> tuple[Tensor, Tensor]:
        # Outputs of the head itself, so that this looks at the arithmetic alone.
        seen: list[Tensor] = []

        def amplify(_module: Any, _args: Any, output: Tensor) -> Tensor:
            # In float32, where nothing overflows and little is rounded.
            seen.append(output.float() * factor)
            return seen[-1]

        handle = self.structure.head.register_forward_hook(amplify)
        try:
            theirs = _logits(self.model, self.ids)
        finally:
            handle.remove()
        ours = seen[-1].reshape(-1, seen[-1].shape[-1])
        return ours[:, : theirs.shape[1]], theirs

    def measured(self, candidates: Sequence[Arithmetic]) -> Iterator[Arithmetic]:
        """Yield what a cap and a factor seem to be, when no field of the config told."""
        _, bent = self._amplified(self.factor * SATURATION)
        largest = float(bent.abs().max())
        cap = largest if largest < 10 * AMPLITUDE else None
        ours, theirs = self._amplified(self.factor / SATURATION**2)
        multiply = float((ours.double() * theirs.double()).sum() / (ours.double() ** 2).sum().clamp_min(1e-300))
        caps = dict.fromkeys([*(item.softcap for item in candidates), cap and simplest(cap, 1e-6)])
        yield from (Arithmetic(multiply=simplest(multiply, 1e-6), softcap=value) for value in caps)


def _read_apart(raw: Unembed, state_SD: Tensor) -> Tensor:
    # The later half first, and alone: no row may depend on its place or on the rows beside it.
    half = len(state_SD) // 2
    later, earlier = raw.logits(state_SD[half:]), raw.logits(state_SD[:half])
    return torch.cat([earlier, later])


@contextmanager
def _last_state(structure: Structure) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []
    handle = structure.blocks[-1].register_forward_hook(
        lambda _m, _a, output: found.append(structure.port.leaving(output).clone())
    )
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _skipped(structure: Structure, first: int) -> Iterator[list[Tensor]]:
    """Make blocks from `first` on hand their input through; the list holds that input once they have run."""
    entered: list[Tensor] = []

    def pass_on(_module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if not entered:
            entered.append(structure.port.entering(args, kwargs).clone())
        return structure.port.replaced(output, entered[0].clone())

    def keep(_module: Any, args: Any, kwargs: Any) -> None:
        # A block may change its input in place, so it is taken before the block runs.
        if not entered:
            entered.append(structure.port.entering(args, kwargs).clone())

    handles = [structure.blocks[first].register_forward_pre_hook(keep, with_kwargs=True)]
    handles += [block.register_forward_hook(pass_on, with_kwargs=True) for block in structure.blocks[first:]]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits = getattr(run(model, ids), "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else "none"
        raise ModelError(f"{type(model).__name__} gives logits of shape {shape}, expected [batch, token, vocabulary]")
    return logits.float().reshape(-1, logits.shape[-1])


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if difference == difference else float("inf")  # NaN never passes


def _state(model: Any, structure: Structure, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with _last_state(structure) as found, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids) if mask is None else mask, use_cache=False)
    return found[-1]


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / one.float().abs().max())


def _require_causal(model: Any, structure: Structure, ids: Tensor, tolerance: float) -> None:
    other = ids.clone()
    other[0, -1] = ids[ids != ids[0, -1]][0]
    if _apart(_state(model, structure, ids)[:, :-1], _state(model, structure, other)[:, :-1]) > tolerance:
        raise ModelError(
            f"earlier positions of {type(model).__name__} see later tokens: it is an encoder, or an encoder used as a "
            "decoder, and the logit lens reads causal language models"
        )


def _heeds_length(config: Any) -> bool:
    """Tell whether numbers depend on how long the padded batch is, in a way that no short probe can show.

    So it is with rotary embeddings that switch at some length, and with attention to an indexer's best positions.
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "index_topk", None):
        return True
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]
    kinds = {rope.get("rope_type", rope.get("type")) for rope in ropes if isinstance(rope, dict)}
    return bool(kinds & {"longrope", "dynamic"})


def _pads(model: Any, structure: Structure, ids: Tensor, drift: float) -> bool:
    """Tell whether a sequence padded on the right, beside a longer one, has the states that it has alone."""
    length = 2 * ids.shape[1] // 3
    both = torch.cat([ids, ids.flip(1)])
    mask = torch.ones_like(both)
    both[1, length:], mask[1, length:] = 0, 0
    together = _state(model, structure, both, mask)
    if together.shape[0] != 2:
        return False
    alone = _state(model, structure, both[1:, :length])
    return max(_apart(alone, together[1:, :length]), _apart(_state(model, structure, ids), together[:1])) <= drift


def _refusal(name: str, tried: Sequence[GateFigures]) -> str:
    findings = [
        f"  with {' -> '.join(found.chain) or 'no final norm'} -> unembedding -> arithmetic {found.arithmetic}: "
        f"logits differ by {found.difference:.2g} of the largest, amplified logits by "
        f"{found.amplified_difference:.2g}, logits of the middle layer by {found.middle_difference:.2g}; "
        f"expected at most {found.tolerance:g} ({found.dtype})"
        for found in tried
    ]
    return "\n".join(
        [
            f"the lens of the last state is not the logits of {name}, so every readout would be wrong; refused.",
            *dict.fromkeys(findings),
            "The model does something after its last block that lenspipe does not know: name its parts in "
            "[model.parts], or report the model.",
        ]
    )
