"""Assemble: the readouts of all cells -> one labelled dataset that opens without lenspipe.

Artifact: `dataset.zarr`. Nothing is computed here: rows are put back into document order and written under their names.
"""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lenspipe.errors import RequestError
from lenspipe.grid import Site
from lenspipe.kernels.windows import Rows, select_rows
from lenspipe.models.facts import ModelFacts
from lenspipe.models.tokenizer import Tokenizer
from lenspipe.recipe import Recipe
from lenspipe.stages.encode import load_columns, load_tokens
from lenspipe.stages.work import VERSION, ShardWork, dataset_inputs, dataset_key
from lenspipe.storage.arrays import Array, read_table
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.dataset import DATASET, DatasetWriter, object_array
from lenspipe.variables import BY_NAME, variables_of

PACKAGES = ("lenspipe", "torch", "transformers", "tokenizers", "numpy", "zarr", "xarray")


def dataset_path(store: ArtifactStore, key: str) -> Path:
    """Where a dataset is, or would be."""
    return store.path("assemble", key) / DATASET


def assemble(
    store: ArtifactStore,
    recipe: Recipe,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    sites: Sequence[Site],
    shards: Sequence[ShardWork],
    tracked: tuple[int, ...],
    report: Callable[[int], None],
) -> None:
    """Write and publish the dataset.

    Args:
        store, recipe, facts, tokenizer: of the run.
        sites: in order of depth.
        shards: all, in order.
        tracked: ids of the tracked tokens.
        report: told the rows of each (layer, block) as it is written.

    Raises:
        DamagedArtifactError: a cell is absent or damaged.
    """
    key = dataset_key(recipe, facts, shards)
    if store.is_whole("assemble", key):
        return
    tables = [_ShardTable(store, recipe, shard) for shard in shards]
    starts = np.concatenate([[0], np.cumsum([len(table.rows) for table in tables])])
    sizes = {
        "layer": len(sites),
        "token": int(starts[-1]),
        "k": recipe.read.top_k,
        "tracked": len(tracked),
        "document": shards[-1].stop,
        "vocab": facts.vocab_size,
    }
    if not sizes["token"]:
        raise RequestError(
            f"no document has a token at the positions {recipe.capture.positions}: widen capture.positions"
        )
    readouts = [variable for variable in variables_of(recipe.measures) if variable.is_readout]
    with store.publish("assemble", key, dataset_inputs(recipe, facts, shards)) as draft:
        writer = DatasetWriter(draft.folder, sizes)
        gate = _worst_gate(store, shards)
        vocabulary = tokenizer.strings(facts.vocab_size)
        small = _small_variables(recipe, sites, tables, vocabulary, tracked)
        writer.create(small, readouts, _attributes(recipe, facts, shards, key, gate))
        for layer, site in enumerate(sites):
            for start, stop in writer.token_blocks():
                pieces: list[Mapping[str, Array]] = []
                for i, table in enumerate(tables):
                    a, b = max(start, starts[i]), min(stop, starts[i + 1])
                    if a < b:
                        found = table.readouts(store, site)
                        pieces.append({name: found[name][a - starts[i] : b - starts[i]] for name in found})
                for variable in readouts:
                    writer.write(variable, layer, start, np.concatenate([piece[variable.name] for piece in pieces]))
                report(stop - start)
        writer.finish()
        draft.attributes.update(rows=sizes["token"], layers=sizes["layer"], documents=sizes["document"])


class _ShardTable:
    """What the dataset needs of one shard."""

    def __init__(self, store: ArtifactStore, recipe: Recipe, shard: ShardWork) -> None:
        self.shard = shard
        self.tokens = load_tokens(store, shard.encode)
        self.rows: Rows = select_rows(self.tokens, recipe.capture.positions)
        self.columns = load_columns(store, shard.encode)
        self.cells = {cell.site: cell for cell in shard.cells}
        self._last: tuple[Site, Mapping[str, Array]] | None = None

    def readouts(self, store: ArtifactStore, site: Site) -> Mapping[str, Array]:
        """One cell's arrays in document order."""
        if self._last is None or self._last[0] != site:
            table = read_table(store, "read", self.cells[site.name].read)
            ordered = {name: np.empty_like(values) for name, values in table.items()}
            for name, values in table.items():
                ordered[name][self.rows.reading_order] = values
            self._last = site, ordered
        return self._last[1]


def _small_variables(
    recipe: Recipe,
    sites: Sequence[Site],
    tables: Sequence[_ShardTable],
    vocabulary: list[str],
    tracked: tuple[int, ...],
) -> dict[str, tuple[tuple[str, ...], Any]]:
    def rows(name: str) -> Any:
        return np.concatenate([getattr(table.rows, name) for table in tables])

    document = np.concatenate([table.rows.document + np.int32(table.shard.start) for table in tables])
    small: dict[str, Any] = {
        "layer": np.array([site.layer for site in sites]),
        "site": np.array([site.name for site in sites], dtype=object),
        "input_id": rows("input_id"),
        "document": document,
        "position": rows("position"),
        "sequence": rows("sequence"),
        "is_special": rows("is_special"),
        "document_length": np.bincount(document, minlength=tables[-1].shard.stop).astype(np.int32),
        "vocab_token": np.array(vocabulary, dtype=object),
    }
    if "topk" in recipe.measures:
        small["k"] = np.arange(recipe.read.top_k, dtype=np.int32)
    if "target" in recipe.measures:
        small["target_id"] = rows("target_id")
    if tracked:
        small["tracked"] = np.array([vocabulary[i] for i in tracked], dtype=object)
        small["tracked_id"] = np.array(tracked, dtype=np.int32)
    if recipe.read.answer:
        for name in ("answer_id", "answer_length"):
            small[name] = np.concatenate([getattr(table.tokens, name) for table in tables])
    placed: dict[str, tuple[tuple[str, ...], Any]] = {
        name: (BY_NAME[name].dims, values) for name, values in small.items()
    }
    for name in recipe.columns:
        placed[name] = (("document",), object_array([v for table in tables for v in table.columns[name]]))
    return placed


def _worst_gate(store: ArtifactStore, shards: Sequence[ShardWork]) -> dict[str, Any]:
    """The figures of the largest difference among the processes that computed the cells."""
    figures = []
    for shard in shards:
        for cell in shard.cells:
            _, manifest = store.open("read", cell.read)
            figures.append(manifest.attributes["gate"])
    return dict(max(figures, key=lambda found: (found["difference"], found["amplified_difference"])))


def _attributes(
    recipe: Recipe, facts: ModelFacts, shards: Sequence[ShardWork], key: str, gate: Mapping[str, Any]
) -> dict[str, Any]:
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    return {
        "Conventions": "CF-1.11",
        "title": f"Logit lens of {facts.name}",
        "source": f"lenspipe {version('lenspipe')}",
        "model": facts.name,
        "recipe": json.dumps(recipe.as_dict()),
        "key": key,
        "keys": json.dumps(
            {"encode": [shard.encode for shard in shards], "read": "see manifest.json beside this store"}
        ),
        "stage_versions": json.dumps(VERSION),
        "digests": json.dumps({"model": facts.digest, "tokenizer": facts.tokenizer_digest}),
        "gate": json.dumps(gate),
        "versions": json.dumps(versions),
    }
