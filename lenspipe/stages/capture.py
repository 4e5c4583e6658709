"""Capture: a shard's tokens -> the residuals of its cells, in reading order.

One forward pass serves all cells of a shard. Artifact per cell: `residual.zarr` with `residual (token, d_model)` and
`row`, the place of each in document order. Only real tokens at the positions asked for are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from lenspipe.errors import NonFiniteError
from lenspipe.grid import Site
from lenspipe.kernels.windows import Index, Rows, TokenShard, select_rows
from lenspipe.models.lens_model import LensModel
from lenspipe.recipe import Recipe
from lenspipe.stages.ahead import ahead
from lenspipe.stages.encode import load_tokens
from lenspipe.stages.work import Cell, ShardWork, capture_inputs, sites_of
from lenspipe.storage.arrays import ResidualWriter
from lenspipe.storage.artifacts import ArtifactStore


def capture(
    store: ArtifactStore,
    recipe: Recipe,
    model: LensModel,
    shard: ShardWork,
    cells: Sequence[Cell],
    report: Callable[[int], None],
) -> None:
    """Capture and publish the residuals of some cells of one shard.

    Args:
        store, recipe, model: of the run.
        shard: which documents.
        cells: which of its cells, none of them done.
        report: told the tokens of each batch.

    Raises:
        NonFiniteError: a state holds NaN or infinity; nothing of this shard is published.
        DamagedArtifactError: the shard's tokens are absent or damaged.
    """
    sites = sites_of(cells, model.facts)
    tokens = load_tokens(store, shard.encode)
    rows = select_rows(tokens, recipe.capture.positions)
    container = "float16" if model.facts.dtype == "float16" else "float32"
    with ExitStack() as stack:
        writers: dict[Site, ResidualWriter] = {}
        for cell, site in zip(cells, sites, strict=True):
            inputs = capture_inputs(recipe, model.facts, shard.tokens, site)
            draft = stack.enter_context(store.publish("capture", cell.capture, inputs))
            attributes = {"site": site.name, "layer": site.layer, "model": model.facts.name, "dtype": model.facts.dtype}
            draft.attributes.update(attributes, gate=model.gate.as_dict(), rows=len(rows))
            writers[site] = ResidualWriter(draft.folder, rows.reading_order, model.facts.d_model, container, attributes)
        keep = recipe.capture.nonfinite == "keep"
        batches = captured_batches(model, tokens, rows, sites, recipe.run.batch_tokens, report, shard.start, keep)
        # The model runs on while a batch is compressed and written.
        for batch in ahead(batches):
            for site, writer in writers.items():
                writer.append(batch[site].to(torch.float16 if container == "float16" else torch.float32).cpu().numpy())
        for writer in writers.values():
            writer.finish()


def captured_batches(
    model: LensModel,
    tokens: TokenShard,
    rows: Rows,
    sites: Sequence[Site],
    batch_tokens: int,
    report: Callable[[int], None],
    first_document: int = 0,
    keep_nonfinite: bool = False,
) -> Iterator[dict[Site, Tensor]]:
    """Run the model over a shard and yield the kept rows of each batch, in reading order.

    `first_document` is the number of the shard's first document in the corpus, for messages; `keep_nonfinite` lets
    states with NaN or infinity pass.

    Yields:
        Per site, [rows, d_model] in the model's dtype, on its device.

    Raises:
        RequestError: the tokenizer has ids that the model has not.
        NonFiniteError: a kept state holds NaN or infinity, named with its document and position.
    """
    model.require_ids(torch.from_numpy(tokens.input_id))
    owner, column = rows.owner[rows.reading_order], rows.column[rows.reading_order]
    done = 0
    for batch in tokens.batches(batch_tokens):
        count = int(np.isin(rows.owner, batch).sum())
        report(int((tokens.length[batch] - tokens.context[batch]).sum()))
        if not count:
            continue
        place = np.full(len(tokens.length), -1)
        place[batch] = np.arange(len(batch))
        ids, mask = padded(tokens, batch)
        states = model.states(ids, mask, sites)
        at = torch.from_numpy(place[owner[done : done + count]]), torch.from_numpy(column[done : done + count])
        kept = {site: state[at[0].to(state.device), at[1].to(state.device)] for site, state in states.items()}
        for site, state in [] if keep_nonfinite else kept.items():
            finite = torch.isfinite(state).all(dim=1)
            if not finite.all():
                row = rows.reading_order[done + int((~finite).nonzero()[0, 0])]
                raise NonFiniteError(
                    f"{site.name} is not finite at position {rows.position[row]} of document "
                    f"{first_document + rows.document[row]} ({int((~finite).sum())} such rows in this batch, "
                    f"{model.facts.dtype}): a wider model.dtype may help; otherwise remove the document, or set "
                    'capture.nonfinite = "keep"'
                )
        done += count
        yield kept


def padded(tokens: TokenShard, batch: Index) -> tuple[Tensor, Tensor]:
    """Lay sequences side by side, padded on the right: ids and mask, int64 [batch, longest]."""
    ids = np.zeros((len(batch), int(tokens.length[batch].max())), dtype=np.int64)
    mask = np.zeros_like(ids)
    for i, sequence in enumerate(batch):
        length, offset = int(tokens.length[sequence]), int(tokens.offset[sequence])
        ids[i, :length] = tokens.input_id[offset : offset + length]
        mask[i, :length] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
