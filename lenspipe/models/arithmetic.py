"""Arithmetic candidates: what a config's fields may mean for the logits. Only the gate can tell."""

from typing import Any

from lenspipe.kernels.head import Arithmetic
from lenspipe.recipe import Parts


def arithmetic_candidates(config: Any, parts: Parts) -> list[Arithmetic]:
    """List what may stand between the unembedding and the logits, most usual reading first.

    `logits_scaling` divides in Granite and multiplies in HyperCLOVA-X. What the user names in parts is taken as said.
    """
    if parts.names_arithmetic:
        return [Arithmetic(parts.multiply, parts.divide, parts.softcap)]

    def field(*names: str) -> float | None:
        values = (getattr(config, name, None) for name in names)
        return next((float(value) for value in values if value is not None), None)

    multiply = field("logit_scale", "lm_head_multiplier")
    scaling = field("logits_scaling")
    cap = field("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap") or None
    if scaling is None:
        return [Arithmetic(multiply=multiply, softcap=cap)]
    return [
        Arithmetic(multiply=multiply, divide=scaling, softcap=cap),
        Arithmetic(multiply=scaling * (multiply or 1.0), softcap=cap),
    ]
