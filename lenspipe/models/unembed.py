"""Unembed: final norm, unembedding, bias, and the family's own logit arithmetic, applied to any vectors.

Residual: a vector of the stream's width. Precision: `model` rounds operands where the model does and keeps float32
logits; `float32` rounds nowhere.
"""

import copy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lenspipe.errors import RequestError
from lenspipe.kernels import head as kernel
from lenspipe.kernels.head import Arithmetic, Head

Precision = Literal["model", "float32"]


@dataclass(frozen=True)
class Unembed:
    """How a model's states are read.

    Attributes:
        chain: the modules in front of the unembedding, final norm first; may be empty.
        head: the unembedding, and the arithmetic behind it.
        dtype: what the chain is given.
        d_model: width of a residual.
    """

    chain: tuple[nn.Module, ...]
    head: Head
    dtype: torch.dtype
    d_model: int

    def at(self, precision: Precision) -> "Unembed":
        """The same, in the precision asked for."""
        if precision == "model" or self.dtype == torch.float32:
            return self
        return replace(self, chain=tuple(copy.deepcopy(m).float() for m in self.chain), dtype=torch.float32)

    def normed(self, residual_RD: Tensor) -> Tensor:
        """Apply final norm and projection: [R, D], float -> [R, D'] of what the unembedding is given.

        No gradient reaches the model's own parameters; one reaches the residual where it asks for it.
        """
        state = residual_RD.to(self.head.weight_VD.device, self.dtype)[None]
        with torch.set_grad_enabled(torch.is_grad_enabled() and state.requires_grad):
            for module in self.chain:
                frozen = {name: value.detach() for name, value in module.named_parameters()}
                state = torch.func.functional_call(module, frozen, (state,))
                state = state[0] if isinstance(state, tuple) else state
        return state[0]

    def logits(self, vectors: Tensor, raw: bool = False, apply_norm: bool = True) -> Tensor:
        """Read vectors: the one arithmetic of this program.

        Args:
            vectors: [..., d_model], float of any kind.
            raw: leave the family's scale and softcap out.
            apply_norm: False for vectors that the final norm has seen already, or that are not to be normed.

        Returns:
            float32 logits [..., V]; equal to the model's own for the last state.

        Raises:
            RequestError: another width.
        """
        rows = self.rows(vectors, apply_norm)
        head = replace(self.head, arithmetic=Arithmetic()) if raw else self.head
        return kernel.logits(head, rows).reshape(*vectors.shape[:-1], -1)

    def rows(self, vectors: Tensor, apply_norm: bool = True) -> Tensor:
        """Check vectors [..., d_model] and lay them out as rows that the unembedding takes: [R, D'].

        Raises:
            RequestError: another width, or no floating-point numbers.
        """
        flat = self.flat(vectors, apply_norm)
        return self.normed(flat) if apply_norm else flat.to(self.head.weight_VD.device)

    def flat(self, vectors: Tensor, apply_norm: bool = True) -> Tensor:
        """Check vectors [..., d_model] and lay them out as rows, computing nothing: [R, d_model].

        Raises:
            RequestError: another width, or no floating-point numbers.
        """
        if not vectors.is_floating_point():
            raise RequestError(f"vectors must be floating-point numbers, found {vectors.dtype}")
        width = self.d_model if apply_norm else self.head.weight_VD.shape[1]
        if vectors.dim() == 0 or vectors.shape[-1] != width:
            raise RequestError(
                f"vectors have shape {tuple(vectors.shape)}, and {'the model' if apply_norm else 'the unembedding'} "
                f"has width {width}: the last dimension must be {width}"
            )
        return vectors.reshape(-1, width)
