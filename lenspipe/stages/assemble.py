"""Assemble: the readouts of all cells -> one labelled dataset that opens without lenspipe.

Artifact: `dataset.zarr`. Nothing is computed here: rows are put back into document order and written under their names.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from lenspipe.errors import RequestError
from lenspipe.grid import Site
from lenspipe.kernels.windows import select_rows
from lenspipe.models.facts import ModelFacts
from lenspipe.models.tokenizer import Tokenizer
from lenspipe.recipe import Recipe, lens_name
from lenspipe.stages.encode import load_columns, load_tokens
from lenspipe.stages.labels import (
    Piece,
    attributes,
    dimensions,
    in_document_order,
    placed_marginal,
    small_variables,
)
from lenspipe.stages.read import mean_probability
from lenspipe.stages.work import (
    DATASET,
    VERSION,
    NamedTokens,
    Place,
    ShardWork,
    dataset_inputs,
    dataset_key,
)
from lenspipe.storage.arrays import Array, read_table
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.dataset import DatasetWriter
from lenspipe.variables import BY_NAME, variables_of

Shapes = Mapping[str, tuple[int, ...]]


def assemble(
    store: ArtifactStore,
    recipe: Recipe,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    sites: Sequence[Site],
    shards: Sequence[ShardWork],
    named: NamedTokens,
    report: Callable[[int], None],
) -> None:
    """Write and publish the dataset.

    Args:
        store, recipe, facts, tokenizer: of the run.
        sites: in order of depth.
        shards: all, in order.
        named: tokens that the recipe names.
        report: told the rows of each (layer, block) as it is written.

    Raises:
        DamagedArtifactError: a cell is absent or damaged.
    """
    key = dataset_key(recipe, facts, shards)
    tables = [_ShardTable(store, recipe, shard) for shard in shards]
    pieces = [table.piece for table in tables]
    starts = np.concatenate([[0], np.cumsum([len(piece.rows) for piece in pieces])])
    lenses = [lens_name(source) for source in recipe.read.lens]
    sizes = dimensions(recipe, lenses, sites, pieces, facts.vocab_size, named)
    if not sizes["token"]:
        raise RequestError(
            f"no document has a token at the positions {recipe.capture.positions}: widen capture.positions"
        )
    readouts = [variable for variable in variables_of(recipe.measures) if variable.is_readout]
    shapes = {variable.name: tuple(sizes[dim] for dim in variable.dims[2:]) for variable in readouts}
    with store.publish("assemble", key, dataset_inputs(recipe, facts, shards)) as draft:
        writer = DatasetWriter(draft.folder / DATASET, sizes)
        gate, broken = _gate_and_broken(store, shards)
        small = small_variables(recipe, lenses, sites, pieces, tokenizer.strings(facts.vocab_size), named)
        if "marginal" in recipe.measures:
            places = [(lens, site.name) for lens in lenses for site in sites]
            means = [mean_probability(table.read(store, place, shapes) for table in tables) for place in places]
            small |= placed_marginal(means, sizes)
        writer.create(small, readouts, attributes(recipe, facts, gate, broken) | _provenance(shards, key))
        for (i, lens), (j, site), (start, stop) in product(enumerate(lenses), enumerate(sites), writer.token_blocks()):
            parts: list[Mapping[str, Array]] = []
            for n, table in enumerate(tables):
                a, b = max(start, starts[n]), min(stop, starts[n + 1])
                if a < b:
                    found = table.readouts(store, (lens, site.name), shapes)
                    parts.append({name: found[name][a - starts[n] : b - starts[n]] for name in found})
            for variable in readouts:
                values = np.concatenate([part[variable.name] for part in parts])
                writer.write(variable, (i, j) if len(lenses) > 1 else (j,), start, values)
            report(stop - start)
        writer.finish()
        draft.attributes.update(rows=sizes["token"], layers=sizes["layer"], documents=sizes["document"])


class _ShardTable:
    """What the dataset needs of one shard."""

    def __init__(self, store: ArtifactStore, recipe: Recipe, shard: ShardWork) -> None:
        tokens = load_tokens(store, shard.encode)
        rows = select_rows(tokens, recipe.capture.positions)
        columns = load_columns(store, shard.encode)
        with store.understood("encode", shard.encode):
            if tokens.n_documents != shard.stop - shard.start or columns.keys() != set(recipe.columns):
                raise ValueError("the shard holds other documents or columns")
        self.piece = Piece(shard.start, shard.stop, tokens, rows, columns)
        self.cells = {(cell.lens, cell.site): cell for cell in shard.cells}
        self._last: tuple[Place, Mapping[str, Array]] | None = None

    def read(self, store: ArtifactStore, place: Place, shapes: Shapes) -> Mapping[str, Array]:
        """One cell's arrays, whose readouts have these shapes beside their rows."""
        key = self.cells[place].read
        table = read_table(store, "read", key)
        with store.understood("read", key):
            for name, shape in shapes.items():
                if table[name].shape != (len(self.piece.rows), *shape) or table[name].dtype != BY_NAME[name].dtype:
                    raise ValueError(f"{name} has shape {table[name].shape} and type {table[name].dtype}")
        return table

    def readouts(self, store: ArtifactStore, place: Place, shapes: Shapes) -> Mapping[str, Array]:
        """One cell's readouts in document order."""
        if self._last is None or self._last[0] != place:
            self._last = place, in_document_order(self.read(store, place, shapes), self.piece.rows)
        return self._last[1]


def _gate_and_broken(store: ArtifactStore, shards: Sequence[ShardWork]) -> tuple[dict[str, Any], dict[str, int]]:
    """The gate's largest figures among the processes that computed the cells; and how many rows are broken where."""
    figures, broken = [], Counter[str]()
    for shard in shards:
        for cell in shard.cells:
            _, manifest = store.open("read", cell.read)
            with store.understood("read", cell.read):
                gate = manifest.attributes["gate"]
                figures.append({**gate, **{name: float(gate[name]) for name in ("difference", "amplified_difference")}})
                broken[f"{cell.lens} {cell.site}"] += int(manifest.attributes.get("broken", 0))
    gate = dict(max(figures, key=lambda found: (found["difference"], found["amplified_difference"])))
    return gate, {place: n for place, n in broken.items() if n}


def _provenance(shards: Sequence[ShardWork], key: str) -> dict[str, Any]:
    keys = {"encode": [shard.encode for shard in shards], "read": "see manifest.json beside this store"}
    return {"key": key, "keys": json.dumps(keys), "stage_versions": json.dumps(VERSION)}
