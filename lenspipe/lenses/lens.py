"""Lens: a map from a residual to one that Unembed can read, for each layer it covers.

Shapes: R rows (states), D width. A layer is the number of blocks applied: 0 is the input of the first block, n_blocks
what enters the final norm.
Mathematics only: no files, no formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lenspipe.errors import RequestError

Kind = Literal["logit", "tuned", "jacobian"]


@dataclass(frozen=True, slots=True, eq=False)
class Translator:
    """The map of one layer: `h W^T + b`, with `h` itself added where `residual` says so.

    Attributes:
        weight_DD: float32; row i gives coordinate i of the result.
        bias_D: float32, or None.
        residual: whether the state is added to the product, as tuned lenses do and Jacobian lenses do not.
    """

    weight_DD: Tensor
    bias_D: Tensor | None
    residual: bool

    def __post_init__(self) -> None:
        width = self.weight_DD.shape[0]
        if self.weight_DD.shape != (width, width) or (self.bias_D is not None and self.bias_D.shape != (width,)):
            raise ValueError(f"a translator is square with a bias as wide, not {self.weight_DD.shape}")

    def apply(self, residual_RD: Tensor) -> Tensor:
        """Map states, in float32: R x D, always a new tensor."""
        state_RD = residual_RD.to(torch.float32)
        mapped_RD = state_RD @ self.weight_DD.T
        if self.bias_D is not None:
            mapped_RD += self.bias_D
        if self.residual:
            mapped_RD += state_RD
        return mapped_RD

    def to(self, device: torch.device | str) -> "Translator":
        """Copy the map to a device."""
        bias_D = None if self.bias_D is None else self.bias_D.to(device)
        return replace(self, weight_DD=self.weight_DD.to(device), bias_D=bias_D)


@dataclass(frozen=True, slots=True, eq=False)
class Lens:
    """A map for each layer that it covers.

    Attributes:
        name: of its file or folder, for people.
        kind: logit (the identity everywhere), tuned or jacobian.
        translators: layer -> its map; layers are whole, from 0 to n_blocks.
        n_blocks: blocks of the model that the lens belongs to; 0 for the logit lens, which belongs to all.
    """

    name: str
    kind: Kind
    translators: Mapping[int, Translator]
    n_blocks: int

    def __post_init__(self) -> None:
        if odd := [layer for layer in self.translators if not 0 <= layer <= self.n_blocks]:
            raise ValueError(f"a model of {self.n_blocks} blocks has no layer {odd[0]}")

    def covers(self, layer: float) -> bool:
        """Tell whether the lens can map a state at this depth.

        The last layer is always covered: both kinds of lens map to it, so where they bring no map it is the identity.
        """
        return self.kind == "logit" or layer == self.n_blocks or layer in self.translators

    def apply(self, residual_RD: Tensor, layer: float) -> Tensor:
        """Map states of one layer to ones that Unembed can read.

        Args:
            residual_RD: float32, the states as the stream holds them, before the final norm.
            layer: blocks applied, 0 to n_blocks.

        Returns:
            float32, R x D; `residual_RD` itself where the map is the identity.

        Raises:
            RequestError: the lens does not cover the layer.
        """
        if not self.covers(layer):
            covered = ", ".join(str(known) for known in sorted({*self.translators, self.n_blocks}))
            raise RequestError(
                f"the lens {self.name} has no map for layer {layer:g}: it covers layers {covered}; "
                "capture those, or read with another lens"
            )
        translator = self.translators.get(layer)  # type: ignore[call-overload]  # 3.0 finds the map of 3
        return residual_RD if translator is None else translator.apply(residual_RD)

    def to(self, device: torch.device | str) -> "Lens":
        """Copy the lens to a device."""
        return replace(self, translators={layer: one.to(device) for layer, one in self.translators.items()})


LOGIT = Lens("logit", "logit", {}, 0)
"""The logit lens: the identity at every layer of every model."""
