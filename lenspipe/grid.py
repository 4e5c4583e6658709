"""Grid: which states are read, of which documents: sites x shards, and a cell where they cross.

Site: the name of the place a state is read, in block i, from 0: `resid_pre.i`, `resid_mid.i` (between attention and
MLP), `resid_post.i`, and `attn_out.i`, `mlp_out.i`, which are what attention and MLP add to the stream.
Layer: a depth, the number of blocks applied: `resid_pre.i` is layer i, `resid_post.i` is layer i + 1, and half a block
lies between. What a branch adds has the depth of the state that it makes.
Shard: consecutive documents, handled as one piece.
This module knows neither models nor files.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lenspipe.errors import RequestError

DEPTHS = {"resid_pre": 0.0, "attn_out": 0.5, "resid_mid": 0.5, "mlp_out": 1.0, "resid_post": 1.0}
"""Kinds of sites in the order in which a block reaches them: depth in blocks, from the block's input."""

KINDS = tuple(DEPTHS)
STREAM = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model where a state, or what is added to it, is read."""

    kind: str
    block: int

    @property
    def name(self) -> str:
        """As written in recipes and datasets, such as `resid_post.10`."""
        return f"{self.kind}.{self.block}"

    @property
    def layer(self) -> float:
        """Number of blocks applied to the state, from 0."""
        return self.block + DEPTHS[self.kind]

    @property
    def is_state(self) -> bool:
        """Whether this is the stream itself, not what a branch adds to it."""
        return self.kind in STREAM

    @property
    def order(self) -> tuple[float, int]:
        """By depth, then in the order of KINDS."""
        return self.layer, KINDS.index(self.kind)

    @property
    def state(self) -> str:
        """Name shared by all sites of one state: the input of block i is the output of block i - 1."""
        if self.kind == "resid_pre" and self.block > 0:
            return f"resid_post.{self.block - 1}"
        return self.name


def previous_site(site: Site) -> Site | None:
    """Find the state one block before a state; None before the first, and for what a branch adds."""
    if not site.is_state or site.layer < 1:
        return None
    if site.kind == "resid_post" and site.block == 0:
        return Site("resid_pre", 0)
    return Site(site.kind, site.block - 1)


def parse_site(name: str, n_blocks: int) -> Site:
    """Read a site's name and hold it against the model's depth.

    Raises:
        RequestError: unknown kind, or no such block.
    """
    kind, _, number = name.partition(".")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RequestError(f"unknown site {name!r}: the kinds are {', '.join(KINDS)}.{hint}")
    if number not in map(str, range(n_blocks)):
        raise RequestError(
            f"unknown site {name!r}: this model has {n_blocks} blocks, so write {kind}.0 to {kind}.{n_blocks - 1}"
        )
    return Site(kind, int(number))


def select_sites(sites: Sequence[str] | None, layers: Sequence[float] | None, n_blocks: int) -> tuple[Site, ...]:
    """List the sites that a request names, in order of depth.

    Args:
        sites: site names, or kinds that stand for all their blocks; None for the whole stream: the input
            of block 0 and the output of every block.
        layers: depths to keep, 0 to n_blocks in steps of 0.5, negative counts from the end; None for all.
        n_blocks: how many blocks the model has.

    Raises:
        RequestError: an unknown site or layer, a layer that no site has, or two names of one state.
    """
    if sites is None:
        chosen = [Site("resid_pre", 0), *(Site("resid_post", i) for i in range(n_blocks))]
    else:
        chosen = []
        for name in dict.fromkeys(sites):
            blocks = range(n_blocks) if name in KINDS else None
            chosen += [Site(name, i) for i in blocks] if blocks else [parse_site(name, n_blocks)]
    by_state: dict[str, Site] = {}
    for site in chosen:
        other = by_state.setdefault(site.state, site)
        if other != site:
            raise RequestError(
                f"sites {other.name} and {site.name} are one state (layer {site.layer:g}): name only one of them"
            )
    if layers is not None:
        depths = {_depth(layer, n_blocks) for layer in layers}
        if absent := depths - {site.layer for site in chosen}:
            raise RequestError(
                f"layer {min(absent):g} is asked for, but no site in capture.sites has it: "
                "leave capture.sites out, or add the site"
            )
        chosen = [site for site in chosen if site.layer in depths]
    return tuple(sorted(dict.fromkeys(chosen), key=lambda site: site.order))


def _depth(layer: float, n_blocks: int) -> float:
    depth = layer + n_blocks + 1 if layer < 0 else layer
    if not 0 <= depth <= n_blocks or depth % 0.5:
        raise RequestError(
            f"unknown layer {layer:g}: this model has {n_blocks} blocks, so layers go from 0 (the input of the first "
            f"block) to {n_blocks} (the output of the last); -1 is the last"
        )
    return float(depth)


def cut_shards(documents: Iterable[tuple[int, bytes]], size: int) -> list[int]:
    """Cut a corpus into shards at boundaries that the documents' own content decides.

    A shard ends where a document's digest says so, once it holds half of `size`, and at the latest when it
    holds twice `size`. So a document inserted anywhere moves the boundaries near it only.

    Args:
        documents: per document, its length in characters and its digest (32 bytes).
        size: the typical length of a shard, in characters.

    Returns:
        For each shard, the number of the document after its last.
    """
    stops: list[int] = []
    held, n = 0, 0
    for n, (characters, content) in enumerate(documents, start=1):
        held += characters
        chance = int.from_bytes(content[:8], "big") / 2**64
        if held >= 2 * size or (held >= size / 2 and chance < characters / (size / 2)):
            stops.append(n)
            held = 0
    if n and (not stops or stops[-1] != n):
        stops.append(n)
    return stops
