"""Branches: what attention and MLP add to the stream inside a block, found by what sums to what.

In a sequential block pre + attention = mid and mid + MLP = post. In a parallel block pre + attention + MLP = post, and
there is no state in the middle. Each identity is checked on numbers, block by block; a place that they do not
prove does not exist. Where a family scales a branch before adding it, what counts is what is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lenspipe.models.structure import Structure, run
from lenspipe.models.watching import Call, Place, at_place, simplest, ulp, watch

BRANCHED = ("attn_out", "resid_mid", "mlp_out")
"""Kinds of sites that lie inside a block."""

ALIKE = 0.9
"""Share of entries that a sum computed anew must hit to the last bit."""

_MIXERS = ("attention", "attn", "mixer", "mamba", "ssm", "conv", "recurrent", "rwkv", "delta")


@dataclass(frozen=True)
class Branch:
    """A module whose output, times a factor, is added to the stream."""

    module: nn.Module
    output: Place
    factor: float

    def added(self, output: Any) -> Tensor:
        """What it adds, from its output."""
        found = at_place(output, self.output)
        return found if self.factor == 1.0 else found * self.factor


@dataclass(frozen=True)
class Middle:
    """The module that is given the state between attention and MLP, and where among its arguments."""

    module: nn.Module
    argument: Place

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The state among a call's arguments."""
        found: Tensor = args[self.argument] if isinstance(self.argument, int) else kwargs[str(self.argument)]
        return found


@dataclass(frozen=True)
class Branches:
    """What is known of the inside of one block.

    Attributes:
        middle, attention, mlp: where there are such; attention is whatever mixes positions.
        reason: why a part is absent.
    """

    middle: Middle | None
    attention: Branch | None
    mlp: Branch | None
    reason: str = ""


@dataclass(frozen=True)
class _Out:
    call: Call
    place: Place
    values: Tensor


def find_branches(model: Any, structure: Structure, ids: Tensor) -> tuple[Branches, ...]:
    """Find the branches of every block.

    Args:
        model, structure: behind the gate.
        ids: the probe.
    """
    with watch(model) as calls:
        run(model, ids)
    found = []
    for block in structure.blocks:
        at = next(i for i, call in enumerate(calls) if call.module is block)
        step = calls[at]
        inside = [call for call in calls[at + 1 :] if call.ended and call.ended < step.ended]
        pre, post = dict(step.given)[structure.port.argument], dict(step.returned)[structure.port.output]
        once = [call for call in inside if sum(other.module is call.module for other in calls) == 1]
        found.append(_branches(once, pre, post))
    return tuple(found)


def _branches(calls: Sequence[Call], pre: Tensor, post: Tensor) -> Branches:
    outs = [_Out(call, p, v.reshape(pre.shape)) for call in calls for p, v in call.returned if v.numel() == pre.numel()]
    for call in calls:
        for place, given in call.given:
            if given.numel() != pre.numel() or torch.equal(given.reshape(pre.shape), pre):
                continue
            mid = given.reshape(pre.shape)
            attention = _added(pre, mid, [out for out in outs if out.call.ended < call.begun])
            mlp = _added(mid, post, [out for out in outs if out.call.begun >= call.begun])
            if attention and mlp:
                return Branches(Middle(call.module, place), attention, mlp)
    pair = _parallel(outs, pre, post)
    if pair:
        return Branches(None, *pair, reason="attention and MLP run in parallel, so there is no state between them")
    if _added(pre, post, outs):
        return Branches(None, None, None, "the block has one branch, so there is no state in its middle")
    return Branches(None, None, None, "its output is not its input with two branches added")


def _added(before: Tensor, after: Tensor, outs: Sequence[_Out]) -> Branch | None:
    """Find the branch that was added between two states."""
    if torch.equal(before, after):
        return None
    change = after.double() - before.double()
    weight = 1 / (before.double().abs() + after.double().abs()).clamp_min(1e-30) ** 2
    for out in outs:
        values = out.values.double()
        c = float((weight * change * values).sum() / (weight * values * values).sum().clamp_min(1e-300))
        for factor in dict.fromkeys([1.0, *(simplest(c, close) for close in (1e-3, 1e-4, 1e-5)), c]):
            added = out.values if factor == 1.0 else out.values * factor
            if _is_sum(after, before + added, before.abs() + added.abs()):
                return Branch(out.call.module, out.place, factor)
    return None


def _is_sum(state: Tensor, total: Tensor, terms: Tensor) -> bool:
    """Tell whether a state is a sum, computed anew in its dtype: equal but for a few last bits.

    Entry by entry: a tolerance relative to the largest entry would let one large channel hide the others.
    """
    apart = (state.double() - total.double()).abs()
    within = apart <= 4 * ulp(state) * terms.double()
    return bool(within.all()) and float((apart == 0).double().mean()) > ALIKE


def _parallel(outs: Sequence[_Out], pre: Tensor, post: Tensor) -> tuple[Branch, Branch] | None:
    for i, first in enumerate(outs):
        for second in outs[i + 1 :]:
            if second.call.begun < first.call.ended:
                continue
            a, b = first.values, second.values
            names = [type(out.call.module).__name__.lower() for out in (first, second)]
            mixes = [any(word in name for word in _MIXERS) for name in names]
            terms = pre.abs() + a.abs() + b.abs()
            orders = ((a + b) + pre, (pre + a) + b, (pre + b) + a)
            if mixes[0] != mixes[1] and any(_is_sum(post, total, terms) for total in orders):
                found = Branch(first.call.module, first.place, 1.0), Branch(second.call.module, second.place, 1.0)
                return found if mixes[0] else (found[1], found[0])
    return None
