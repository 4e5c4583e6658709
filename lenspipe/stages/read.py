"""Read: a shard's residuals -> the readouts of its cells.

Rows are read in blocks as large as the memory budget allows, each block at every site before the next, so that the last
layer's distribution is computed once a block. With stored residuals and while capturing, the blocks are the same
and so are the numbers. Artifact per cell: a table with one array per readout variable, in reading order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lenspipe.grid import Site
from lenspipe.kernels import readout as kernel
from lenspipe.kernels.readout import Request
from lenspipe.kernels.windows import Rows, TokenShard, select_rows
from lenspipe.models.lens_model import LensModel
from lenspipe.recipe import Recipe
from lenspipe.stages.capture import captured_batches
from lenspipe.stages.encode import load_tokens
from lenspipe.stages.work import Cell, ShardWork, read_inputs, sites_of
from lenspipe.storage.arrays import Array, open_residual, write_table
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.variables import variables_of

Blocks = Iterator[Mapping[Site, Tensor]]


def read(
    store: ArtifactStore,
    recipe: Recipe,
    model: LensModel,
    shard: ShardWork,
    cells: Sequence[Cell],
    tracked: tuple[int, ...],
    stream: bool,
    report: Callable[[int], None],
) -> None:
    """Read out and publish some cells of one shard.

    Args:
        store, recipe, model: of the run.
        shard: which documents.
        cells: which of its cells; those already done are passed over.
        tracked: ids of the tracked tokens.
        stream: capture now and store no residuals, instead of reading stored ones.
        report: told the tokens (streaming) or rows (stored) of each block.

    Raises:
        DamagedArtifactError: tokens or residuals are absent or damaged.
    """
    cells = [cell for cell in cells if not store.is_whole("read", cell.read)]
    if not cells:
        return
    tokens = load_tokens(store, shard.encode)
    rows = select_rows(tokens, recipe.capture.positions)
    request = Request(recipe.measures, recipe.read.top_k, tracked)
    head = model.unembed.head
    height = kernel.rows_per_block(recipe.run.memory, head, model.facts.n_blocks + 1)
    needed = {cell.site: cell for cell in (*cells, *([shard.final] if shard.final else []))}
    sites = sites_of(needed.values(), model.facts)
    if stream:
        batches = captured_batches(model, tokens, rows, sites, recipe.run.batch_tokens, report, shard.start)
        blocks = _regroup(batches, height)
    else:
        blocks = _stored_blocks(store, dict(zip(sites, needed.values(), strict=True)), len(rows), height, report)
    readouts = read_blocks(
        model, tokens, rows, request, dict(zip(sites_of(cells, model.facts), cells, strict=True)), blocks
    )
    for cell in cells:
        final = shard.final.capture if shard.final else None
        with store.publish("read", cell.read, read_inputs(recipe, cell.capture, final, shard.answers)) as draft:
            write_table(draft.folder, readouts[cell.site])
            draft.attributes.update(site=cell.site, rows=len(rows), gate=model.gate.as_dict())


def read_blocks(
    model: LensModel,
    tokens: TokenShard,
    rows: Rows,
    request: Request,
    sites: Mapping[Site, object],
    blocks: Blocks,
) -> dict[str, dict[str, Array]]:
    """Compute the readouts of whole blocks of rows.

    Args:
        model: with its Unembed.
        tokens, rows: of the shard.
        request: which measures.
        sites: which to read; the blocks may hold the last layer's site beside them.
        blocks: residuals of consecutive rows in reading order, per site.

    Returns:
        Per site name and variable, an array over all rows in reading order.
    """
    order = rows.reading_order
    target = torch.from_numpy(rows.target_id[order].astype(np.int64))
    answer = torch.from_numpy(tokens.answer_id[rows.document[order]].astype(np.int64))
    lengths = {"k": request.top_k, "tracked": len(request.tracked)}
    readouts: dict[str, dict[str, Array]] = {
        site.name: {
            variable.name: np.empty((len(rows), *(lengths[dim] for dim in variable.dims[2:])), dtype=variable.dtype)
            for variable in variables_of(request.measures)
            if variable.is_readout
        }
        for site in sites
    }
    last = Site("resid_post", model.facts.n_blocks - 1)
    unembed = model.unembed
    device = unembed.head.weight_VD.device
    start = 0
    for block in blocks:
        stop = start + len(next(iter(block.values())))
        final = kernel.log_softmax(unembed.logits(block[last])) if "kl_final" in request.measures else None
        ids = target[start:stop].to(device), answer[start:stop].to(device)
        for site in sites:
            found = kernel.read_rows(unembed.head, unembed.normed(block[site]), request, *ids, final)
            for name, values in found.items():
                readouts[site.name][name][start:stop] = values.cpu().numpy()
        start = stop
    if start != len(rows):
        raise ValueError(f"{start} of {len(rows)} rows were read")
    return readouts


def _regroup(batches: Iterator[dict[Site, Tensor]], height: int) -> Blocks:
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
    store: ArtifactStore, cells: Mapping[Site, Cell], n_rows: int, height: int, report: Callable[[int], None]
) -> Blocks:
    readers = {site: open_residual(store, cell.capture) for site, cell in cells.items()}
    for start in range(0, n_rows, height):
        stop = min(start + height, n_rows)
        yield {site: torch.from_numpy(reader.rows(start, stop)) for site, reader in readers.items()}
        report(stop - start)
