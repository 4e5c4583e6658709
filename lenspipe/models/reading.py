"""Reading: one forward pass that stops at the last site asked for, and the states it passed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lenspipe.errors import ModelError
from lenspipe.grid import Site
from lenspipe.models.branches import Branches
from lenspipe.models.structure import Structure


class _EnoughError(Exception):
    """Raised by a hook to end the forward pass once the last site has been read."""


def read_states(
    hf: Any,
    structure: Structure,
    branches: Sequence[Branches],
    sites: Sequence[Site],
    ids_BS: Tensor,
    mask_BS: Tensor,
) -> dict[Site, Tensor]:
    """Run a model up to the deepest of the sites and return what passed there, [B, S, D] each.

    Args:
        hf, structure: behind the gate.
        branches: of every block; not looked at but for resid_mid, attn_out and mlp_out.
        sites: where to read.
        ids_BS, mask_BS: token ids, and 1 where there is a token.

    Raises:
        ModelError: a site that this model does not have, saying why.
    """
    found: dict[Site, Tensor] = {}
    wanted = set(sites)

    def keep(site: Site, state: Tensor) -> None:
        # A copy, since a block may go on to add to its input in place.
        found[site] = state.clone().reshape(*ids_BS.shape, -1)
        if len(found) == len(wanted):
            raise _EnoughError

    with _hooks(structure, branches, wanted, keep), torch.no_grad(), suppress(_EnoughError):
        hf(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False)
    if missing := [site.name for site in sites if site not in found]:
        raise ModelError(f"{type(hf).__name__} ran without passing {', '.join(missing)}: it cannot be read there")
    return found


@contextmanager
def _hooks(
    structure: Structure,
    branches: Sequence[Branches],
    sites: set[Site],
    keep: Callable[[Site, Tensor], None],
) -> Iterator[None]:
    handles = []
    for site in sites:
        module, enters, take = _place(structure, branches, site)
        if enters:

            def before(_m: Any, args: Any, kwargs: Any, site: Site = site, take: Any = take) -> None:
                keep(site, take(args, kwargs))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:

            def after(_m: Any, _args: Any, output: Any, site: Site = site, take: Any = take) -> None:
                keep(site, take(output))

            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _place(structure: Structure, branches: Sequence[Branches], site: Site) -> tuple[Any, bool, Any]:
    """Find the module of a site, whether its input or its output is read, and how."""
    block, port = structure.blocks[site.block], structure.port
    if site.kind == "resid_pre":
        return block, True, port.entering
    if site.kind == "resid_post":
        return block, False, port.leaving
    require_sites(branches, [site])
    inside = branches[site.block]
    if site.kind == "resid_mid" and inside.middle:
        return inside.middle.module, True, inside.middle.given
    branch = inside.attention if site.kind == "attn_out" else inside.mlp
    if branch is None:
        raise AssertionError(f"{site.name} was required and is not there")
    return branch.module, False, branch.added


def require_sites(branches: Sequence[Branches], sites: Sequence[Site]) -> None:
    """Make sure that blocks have the places asked for.

    Raises:
        ModelError: one has not, saying why, and which blocks have it.
    """
    for site in sites:
        attribute = {"resid_mid": "middle", "attn_out": "attention", "mlp_out": "mlp"}.get(site.kind)
        if attribute is None or getattr(branches[site.block], attribute) is not None:
            continue
        have = ", ".join(str(i) for i, inside in enumerate(branches) if getattr(inside, attribute) is not None)
        where = f"blocks that have {site.kind}: {have}" if have else f"no block of this model has {site.kind}"
        raise ModelError(f"{site.name} does not exist: {branches[site.block].reason}; {where}")
