"""Watching: one forward pass, seen module by module, and where in a call a tensor stands.

Port: the place of the residual stream among a block's arguments and outputs; found by what is passed, never by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

Place = int | str | None
"""Of a tensor: index among positional arguments or outputs, name among keyword arguments, None if it is the output."""


@dataclass
class Call:
    """One call of a module.

    Attributes:
        module: what was called.
        given, returned: floating-point tensors among its arguments and outputs, with their places.
        begun, ended: moments, counted over all starts and ends of calls.
    """

    module: nn.Module
    given: list[tuple[Place, Tensor]]
    begun: int
    returned: list[tuple[Place, Tensor]] = field(default_factory=list)
    ended: int = -1


@dataclass(frozen=True, slots=True)
class Port:
    """Where a block takes the residual stream in and where it lets it out."""

    argument: Place
    output: Place

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The state among a call's arguments."""
        found: Tensor = args[self.argument] if isinstance(self.argument, int) else kwargs[str(self.argument)]
        return found

    def leaving(self, output: Any) -> Tensor:
        """The state among a call's outputs."""
        return at_place(output, self.output)

    def replaced(self, output: Any, state: Tensor) -> Any:
        """The outputs of a call with another state in place of its own."""
        if self.output is None:
            return state
        changed = list(output)
        changed[int(self.output)] = state
        return tuple(changed) if isinstance(output, tuple) else changed


def at_place(output: Any, place: Place) -> Tensor:
    """Take a tensor out of a module's output."""
    found: Tensor = output if place is None else output[place]
    return found


@contextmanager
def watch(model: nn.Module) -> Iterator[list[Call]]:
    """Record every call of every module inside, in the order in which they begin."""
    calls: list[Call] = []
    running: list[Call] = []
    moment = 0

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal moment
        moment += 1
        running.append(Call(module, _tensors([*enumerate(args), *kwargs.items()]), moment))
        calls.append(running[-1])

    def end(module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal moment
        moment += 1
        # A module called with hooks that ended early is dropped from the stack with its caller.
        while running and running[-1].module is not module:
            running.pop()
        if running:
            call = running.pop()
            call.ended = moment
            call.returned = _tensors(enumerate(output) if isinstance(output, tuple | list) else [(None, output)])

    handles = [module.register_forward_pre_hook(start, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(end) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _tensors(places: Any) -> list[tuple[Place, Tensor]]:
    # Copies, since a module may go on to change its input in place; on the host, where there is room for all of them.
    found = [(place, value) for place, value in places if isinstance(value, Tensor) and value.is_floating_point()]
    return [(place, value.detach().to("cpu", copy=True)) for place, value in found if value.dim()]


def same(given: Tensor, state: Tensor) -> bool:
    """Tell whether a tensor is this state: all of it or its last positions, perhaps rounded to another dtype."""
    pair = _aligned(given, state)
    return pair is not None and torch.equal(pair[0], pair[1].to(pair[0].dtype))


def factor(given: Tensor, state: Tensor) -> float | None:
    """Find the number c with given = c * state, entry by entry to rounding; None where there is no such number.

    `given` may hold only the last positions of `state`.
    """
    pair = _aligned(given, state)
    if pair is None:
        return None
    wide, other = pair[0].double(), pair[1].double()
    there = other != 0
    if not there.any() or not torch.isfinite(wide).all():
        return None
    scale = float((wide[there] / other[there]).median())
    # Entry by entry, so that one large channel does not hide what happens to the others.
    unit = max(ulp(given), ulp(state))
    if scale == 0 or bool(((wide - scale * other).abs() > 4 * unit * wide.abs()).any()):
        return None
    return simplest(scale, unit)


def ulp(values: Tensor) -> float:
    """Largest relative rounding of a tensor's dtype."""
    return torch.finfo(values.dtype).eps / 2


def _aligned(given: Tensor, state: Tensor) -> tuple[Tensor, Tensor] | None:
    if given.shape[-1] != state.shape[-1]:
        return None
    rows, known = given.reshape(-1, given.shape[-1]), state.reshape(-1, state.shape[-1])
    return (rows, known[-len(rows) :]) if 0 < len(rows) <= len(known) else None


def simplest(value: float, close: float) -> float:
    """Undo the rounding of a measured factor: those in use are simple fractions."""
    for largest in (1, 16, 256, 4096):
        simple = float(Fraction(value).limit_denominator(largest))
        if abs(simple - value) <= close * abs(value):
            return simple
    return value
