"""Head: the unembedding as numbers, what its family does to the logits behind it, and which measures are asked.

Shapes: R rows (states), D width, V vocabulary. Logits are float32 and those after the family's own arithmetic.
Knows nothing of how a product is computed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 256
"""Tokens of the vocabulary that are multiplied at once: a tile of their logits stays in a core's cache."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a family does to its logits after the unembedding: multiply, divide, then cap."""

    multiply: float | None = None
    divide: float | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        steps = [f"{name} {value:g}" for name, value in self.as_dict().items() if value is not None]
        return ", then ".join(steps) or "none"

    def as_dict(self) -> dict[str, float | None]:
        """The three steps by name."""
        return {"multiply": self.multiply, "divide": self.divide, "softcap": self.softcap}

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Apply all steps, leaving the argument as it is; a gradient passes."""
        if self.multiply is not None:
            logits_RV = logits_RV * self.multiply
        if self.divide is not None:
            logits_RV = logits_RV / self.divide
        return logits_RV if self.softcap is None else (logits_RV / self.softcap).tanh() * self.softcap

    def apply_(self, logits_RV: Tensor) -> Tensor:
        """Apply all steps in place."""
        if self.multiply is not None:
            logits_RV.mul_(self.multiply)
        if self.divide is not None:
            logits_RV.div_(self.divide)
        if self.softcap is not None:
            logits_RV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_RV


@dataclass(frozen=True, slots=True)
class Head:
    """The unembedding and the arithmetic behind the product.

    Attributes:
        weight_VD: contiguous, in the model's own dtype.
        bias_V: float32, or None.
        arithmetic: what follows the product.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    arithmetic: Arithmetic

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return self.weight_VD.shape[0]


@dataclass(frozen=True, slots=True)
class Request:
    """Which measures to compute: names as in variables.MEASURES, and `tracked`, `token_sets`, `answer` and `logprob`.

    The ids of `tracked` and `token_sets` are given here, those of `answer` row by row. `logprob` brings, beside every
    logit, its log-probability, which keeps digits that logit - logsumexp loses.
    """

    measures: frozenset[str]
    top_k: int
    tracked: tuple[int, ...] = ()
    sets: tuple[tuple[int, ...], ...] = ()


def logits(head: Head, normed_RD: Tensor) -> Tensor:
    """Unembed normed states: float32 logits_RV, from float32 products of the operands as they are."""
    operand, weight = normed_RD.to(torch.float32), head.weight_VD
    if weight.dtype == torch.float32 or operand.requires_grad:
        product = operand @ weight.float().T
    else:
        product = operand.new_empty(len(operand), len(weight))
        for start in range(0, len(weight), TILE):
            torch.mm(operand, weight[start : start + TILE].float().T, out=product[:, start : start + TILE])
    if head.bias_V is not None:
        product = product + head.bias_V if product.requires_grad else product.add_(head.bias_V)
    return head.arithmetic.apply(product) if product.requires_grad else head.arithmetic.apply_(product)
