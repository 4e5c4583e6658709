"""Read: a shard's residuals -> the readouts of its cells.

Rows are read in blocks as large as the memory budget allows, each block at every site with every lens before the next,
so that the last layer's distribution is computed once a block. With stored residuals and while capturing, the blocks
are the same and so are the numbers. Artifact per cell: a table with one array per readout variable, in reading order,
and what becomes one number for all rows: BROKEN, how many have logits that are not finite, and MARGINAL, the sum of the
rows' probabilities and the number of these rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lenspipe.errors import NonFiniteError, RequestError
from lenspipe.grid import Site, previous_site
from lenspipe.kernels import marginal
from lenspipe.kernels import readout as kernel
from lenspipe.kernels.head import Request
from lenspipe.kernels.windows import Rows, TokenShard, select_rows
from lenspipe.lenses.files import lens_digest, load_lens
from lenspipe.lenses.lens import LOGIT, Lens
from lenspipe.models.facts import ModelFacts
from lenspipe.models.lens_model import LensModel
from lenspipe.models.unembed import Unembed
from lenspipe.recipe import Recipe, lens_name
from lenspipe.stages.ahead import ahead
from lenspipe.stages.capture import captured_batches
from lenspipe.stages.encode import load_tokens
from lenspipe.stages.work import Cell, NamedTokens, Place, ShardWork, last_site, lens_digests, read_inputs, sites_of
from lenspipe.storage.arrays import Array, open_residual, write_table
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.variables import AGAINST_FINAL, OFFSETS, variables_of

BROKEN = "broken_count"
MARGINAL = ("marginal_sum", "marginal_count")
Blocks = Iterator[Mapping[Site, Tensor]]


def load_lenses(
    recipe: Recipe, facts: ModelFacts, sites: Iterable[Site], given: Mapping[str, Lens] | None = None
) -> dict[str, Lens]:
    """Load the lenses of a recipe, name -> lens, and hold them against the states to be read.

    Args:
        recipe, facts: of the run.
        sites: to be read.
        given: lenses that are in memory already, by the name that the recipe has for them.

    Raises:
        RequestError: a lens that is not of this model, or has no map for a state, where the recipe does not say to
            read that by the logit lens.
    """
    loaded = {}
    sources = {lens_name(source): source for source in recipe.read.lens}
    for name, source in sources.items():
        if given and name in given:
            loaded[name] = given[name]
        elif source == "logit":
            loaded[name] = LOGIT
        else:
            path = recipe.path(source)
            loaded[name] = _load_lens(path, lens_digest(path), facts.d_model, facts.n_blocks)
        if recipe.read.uncovered == "refuse" and (bare := [s.name for s in sites if not _covers(loaded[name], s)]):
            layers = ", ".join(str(layer) for layer in sorted({*loaded[name].translators, facts.n_blocks}))
            some = f"{', '.join(bare[:5])}{' ...' if bare[5:] else ''}"
            raise RequestError(
                f"the lens {name} has no map for {some}: it covers the stream at layers {layers}; choose "
                'those in [capture], or set read.uncovered = "logit"'
            )
    return loaded


@lru_cache(maxsize=2)
def _load_lens(path: Path, digest: str, d_model: int, n_blocks: int) -> Lens:
    # The digest is there so that a changed file is loaded anew.
    return load_lens(path, d_model, n_blocks)


def _covers(lens: Lens, site: Site) -> bool:
    # What a branch adds is no state, so no trained lens has a map for it.
    return lens.kind == "logit" or (site.is_state and lens.covers(site.layer))


def read(
    store: ArtifactStore,
    recipe: Recipe,
    model: LensModel,
    shard: ShardWork,
    cells: Sequence[Cell],
    named: NamedTokens,
    stream: bool,
    report: Callable[[int], None],
) -> None:
    """Read out and publish some cells of one shard.

    Args:
        store, recipe, model: of the run.
        shard: which documents.
        cells: which of its cells, none of them done.
        named: tokens that the recipe names.
        stream: capture now and store no residuals, instead of reading stored ones.
        report: told the tokens (streaming) or rows (stored) of each block.

    Raises:
        DamagedArtifactError: tokens or residuals are absent or damaged.
    """
    tokens = load_tokens(store, shard.encode)
    rows = select_rows(tokens, recipe.capture.positions)
    request = request_of(recipe, named)
    needed = {cell.site: cell for cell in (*cells, *shard.beside)}
    height = kernel.rows_per_block(recipe.run.memory, model.unembed.head, len(needed) + len(cells))
    sites = sites_of(needed.values(), model.facts)
    lenses = load_lenses(recipe, model.facts, sites_of(cells, model.facts))
    if stream:
        keep = recipe.capture.nonfinite == "keep"
        batches = captured_batches(model, tokens, rows, sites, recipe.run.batch_tokens, report, shard.start, keep)
        # A GPU's model runs on while its states are read; a CPU has no cores to spare for that.
        blocks = regroup(batches if model.device.type == "cpu" else ahead(batches), height)
    else:
        stored, shape = dict(zip(sites, needed.values(), strict=True)), (len(rows), model.facts.d_model)
        blocks = ahead(_stored_blocks(store, stored, shape, height, report))
    places = {(cell.lens, site): cell for cell, site in zip(cells, sites_of(cells, model.facts), strict=True)}
    unembed = model.unembed.at(recipe.read.precision)
    readouts = read_blocks(unembed, model.facts, tokens, rows, request, lenses, list(places), blocks)
    if recipe.capture.nonfinite == "refuse":
        refuse_broken(readouts, (shard.start, shard.stop), model.facts)
    digests, way = lens_digests(recipe), kernel.way(unembed.head, unembed.dtype)
    for cell in cells:
        inputs = read_inputs(recipe, cell.capture, shard.final, shard.answers, digests[cell.lens])
        with store.publish("read", cell.read, inputs) as draft:
            write_table(draft.folder, readouts[cell.lens, cell.site])
            draft.attributes.update(
                site=cell.site,
                lens=cell.lens,
                rows=len(rows),
                broken=int(readouts[cell.lens, cell.site][BROKEN][0]),
                gate=model.gate.as_dict(),
                kernel=way,
            )


def request_of(recipe: Recipe, named: NamedTokens) -> Request:
    """What a recipe asks of the kernel."""
    return Request(recipe.measures, recipe.read.top_k, named.tracked, tuple(named.sets.values()))


def read_blocks(
    unembed: Unembed,
    facts: ModelFacts,
    tokens: TokenShard,
    rows: Rows,
    request: Request,
    lenses: Mapping[str, Lens],
    places: Sequence[tuple[str, Site]],
    blocks: Blocks,
) -> dict[Place, dict[str, Array]]:
    """Compute the readouts of whole blocks of rows.

    Args:
        unembed: in the precision asked for.
        facts: of the model.
        tokens, rows: of the shard.
        request: which measures.
        lenses: by name.
        places: which site to read with which lens; the blocks may hold the last layer's site beside them.
        blocks: residuals of consecutive rows in reading order, per site.

    Returns:
        Per (lens, site) name: per variable, an array over all rows in reading order; BROKEN; MARGINAL if asked for.
    """
    order = rows.reading_order
    device = unembed.head.weight_VD.device
    known = {name: getattr(rows, f"{name}_id") for name in OFFSETS} | {"answer": tokens.answer_id[rows.document]}
    asked = {
        name: torch.from_numpy(ids[order].astype(np.int64)).to(device)
        for name, ids in known.items()
        if name in request.measures
    }
    readouts = {(lens, site.name): _empty(request, len(rows), unembed.head.vocab_size) for lens, site in places}
    mapped = {name: lens.to(device) for name, lens in lenses.items()}
    readers = [(mapped[name], site) for name, site in places]
    final = None
    if request.measures & AGAINST_FINAL:
        last = last_site(facts)
        there = [i for i, (lens, site) in enumerate(readers) if lens.kind == "logit" and site == last]
        readers += [] if there else [(LOGIT, last)]
        final = there[0] if there else len(places)
    counted = torch.from_numpy(~rows.is_special[order]).to(device)
    request = replace(request, measures=request.measures | {"logsumexp"})  # tells which rows are broken
    start, n = 0, len(places)
    for block in blocks:
        stop = start + len(next(iter(block.values())))
        normed = torch.stack([_normed(unembed, lens, site, block[site].to(device)) for lens, site in readers])
        part = {name: ids[start:stop] for name, ids in asked.items()}
        found = kernel.read_rows(unembed.head, normed, request, part, final)
        found |= _of_states(request, [site for _, site in readers], block, last_site(facts))
        for variable, values in found.items():
            for (name, site), read_out in zip(places, values.cpu().numpy(), strict=False):
                if variable in readouts[name, site.name]:
                    readouts[name, site.name][variable][start:stop] = read_out
        for (name, site), lse_R in zip(places, found["logsumexp"][:n], strict=True):
            readouts[name, site.name][BROKEN] += int((~lse_R.isfinite()).sum())
        if "marginal" in request.measures:
            added = marginal.add_up(unembed.head, normed[:n], found["logsumexp"][:n], counted[start:stop])
            for (name, site), *parts in zip(places, *(part.cpu().numpy() for part in added), strict=True):
                for array, part in zip(MARGINAL, parts, strict=True):
                    readouts[name, site.name][array] += part
        start = stop
    if start != len(rows):
        raise ValueError(f"{start} of {len(rows)} rows were read")
    return readouts


def refuse_broken(readouts: Mapping[Place, Mapping[str, Array]], documents: tuple[int, int], facts: ModelFacts) -> None:
    """Refuse logits that are not finite though the states are.

    Args:
        readouts: as `read_blocks` gives them.
        documents: numbers of the first, and of that after the last.
        facts: of the model.

    Raises:
        NonFiniteError: there are some.
    """
    for (lens, site), table in readouts.items():
        if n := int(table[BROKEN][0]):
            raise NonFiniteError(
                f"{n} rows of documents {documents[0]} to {documents[1] - 1} have logits that are not finite at "
                f"{site}, read with the lens {lens} ({facts.dtype}): a wider model.dtype may help; otherwise set "
                'capture.nonfinite = "keep"'
            )


def _of_states(request: Request, sites: Sequence[Site], block: Mapping[Site, Tensor], last: Site) -> dict[str, Tensor]:
    """Measures of the residuals themselves, [P, R]; sums in float64."""
    found = {}
    if "residual_norm" in request.measures:
        found["residual_norm"] = torch.stack([block[site].double().norm(dim=1) for site in sites]).float()
    if "cosine_final" in request.measures:
        found["cosine_final"] = torch.stack([_cosine(block, site, last) for site in sites]).float()
    if "cosine_previous" in request.measures:
        found["cosine_previous"] = torch.stack([_cosine(block, site, previous_site(site)) for site in sites]).float()
    return found


def _cosine(block: Mapping[Site, Tensor], site: Site, other: Site | None) -> Tensor:
    a = block[site].double()
    b = block[other].double() if other else torch.full_like(a, torch.nan)
    cosine_R: Tensor = (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))
    return cosine_R


def _normed(unembed: Unembed, lens: Lens, site: Site, state: Tensor) -> Tensor:
    if lens.kind != "logit" and _covers(lens, site):
        state = lens.apply(state.float(), site.layer)
    return unembed.normed(state)


def mean_probability(tables: Iterable[Mapping[str, Array]]) -> Array:
    """Put together the marginal of all tables of one place: float32 [V]; NaN where no row was counted."""
    sums, counts = zip(*([table[name] for name in MARGINAL] for table in tables), strict=True)
    with np.errstate(invalid="ignore"):
        mean_V: Array = (np.sum(sums, axis=0) / np.sum(counts)).astype(np.float32)
    return mean_V


def _empty(request: Request, n_rows: int, n_vocab: int) -> dict[str, Array]:
    lengths = {"k": request.top_k, "tracked": len(request.tracked), "set": len(request.sets)}
    sums = (np.zeros(n_vocab), np.zeros(1, np.int64)) if "marginal" in request.measures else ()
    return {BROKEN: np.zeros(1, np.int64), **dict(zip(MARGINAL, sums, strict=False))} | {
        variable.name: np.empty((n_rows, *(lengths[dim] for dim in variable.dims[2:])), dtype=variable.dtype)
        for variable in variables_of(request.measures)
        if variable.is_readout
    }


def regroup(batches: Iterator[dict[Site, Tensor]], height: int) -> Blocks:
    """Turn batches of any size into blocks of `height` rows; the last may be shorter."""
    held: dict[Site, Tensor] = {}
    for batch in batches:
        held = {site: torch.cat([held[site], state]) if held else state for site, state in batch.items()}
        while len(next(iter(held.values()))) >= height:
            yield {site: state[:height] for site, state in held.items()}
            held = {site: state[height:] for site, state in held.items()}
    if held and len(next(iter(held.values()))):
        yield held


def _stored_blocks(
    store: ArtifactStore,
    cells: Mapping[Site, Cell],
    shape: tuple[int, int],
    height: int,
    report: Callable[[int], None],
) -> Blocks:
    readers, n_rows = {site: open_residual(store, cell.capture, shape) for site, cell in cells.items()}, shape[0]
    for start in range(0, n_rows, height):
        stop = min(start + height, n_rows)
        yield {site: torch.from_numpy(reader.rows(start, stop)) for site, reader in readers.items()}
        report(stop - start)
