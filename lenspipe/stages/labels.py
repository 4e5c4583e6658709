"""Labels: all of a dataset but its readouts: dimensions, coordinates, small variables, attributes.

Piece: consecutive documents with their tokens and rows: a shard of a corpus, or the prompts read in memory.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from lenspipe.grid import Site
from lenspipe.kernels.windows import Rows, TokenShard
from lenspipe.models.facts import ModelFacts
from lenspipe.recipe import Recipe
from lenspipe.stages.work import NamedTokens
from lenspipe.storage.arrays import Array
from lenspipe.storage.dataset import object_array, readout_dims
from lenspipe.variables import BY_NAME, OFFSETS

PACKAGES = ("lenspipe", "torch", "transformers", "tokenizers", "numpy", "zarr", "xarray")

Placed = dict[str, tuple[tuple[str, ...], Any]]
"""Name -> (dims, values)."""


@dataclass(frozen=True)
class Piece:
    """Consecutive documents.

    Attributes:
        start, stop: their numbers.
        tokens, rows: theirs.
        columns: kept column -> value per document.
    """

    start: int
    stop: int
    tokens: TokenShard
    rows: Rows
    columns: Mapping[str, list[Any]]


def dimensions(
    recipe: Recipe,
    lenses: Sequence[str],
    sites: Sequence[Site],
    pieces: Sequence[Piece],
    vocab_size: int,
    named: NamedTokens,
) -> dict[str, int]:
    """Length of every dimension; `lens` is one only where there are several."""
    return {
        **({"lens": len(lenses)} if len(lenses) > 1 else {}),
        "layer": len(sites),
        "token": sum(len(piece.rows) for piece in pieces),
        "k": recipe.read.top_k,
        "tracked": len(named.tracked),
        "set": len(named.sets),
        "document": pieces[-1].stop,
        "vocab": vocab_size,
    }


def in_document_order(table: Mapping[str, Array], rows: Rows) -> dict[str, Array]:
    """Put a cell's readouts, which stand in reading order, back into document order."""
    ordered = {name: np.empty_like(values) for name, values in table.items() if name in BY_NAME}
    for name, values in ordered.items():
        values[rows.reading_order] = table[name]
    return ordered


def small_variables(
    recipe: Recipe,
    lenses: Sequence[str],
    sites: Sequence[Site],
    pieces: Sequence[Piece],
    vocabulary: list[str],
    named: NamedTokens,
) -> Placed:
    """Lay out coordinates and small variables.

    Args:
        recipe: what is kept.
        lenses: names.
        sites: in order of depth.
        pieces: in order.
        vocabulary: the string of every id.
        named: tokens that the recipe names.
    """

    def rows(name: str) -> Any:
        return np.concatenate([getattr(piece.rows, name) for piece in pieces])

    document = np.concatenate([piece.rows.document + np.int32(piece.start) for piece in pieces])
    small: dict[str, Any] = {
        "layer": np.array([site.layer for site in sites]),
        "site": np.array([site.name for site in sites], dtype=object),
        "input_id": rows("input_id"),
        "document": document,
        "position": rows("position"),
        "sequence": rows("sequence"),
        "is_special": rows("is_special"),
        "document_length": np.bincount(document, minlength=pieces[-1].stop).astype(np.int32),
        "vocab_token": np.array(vocabulary, dtype=object),
    }
    if "topk" in recipe.measures:
        small["k"] = np.arange(recipe.read.top_k, dtype=np.int32)
    for measure in recipe.measures & OFFSETS.keys():
        small[f"{measure}_id"] = rows(f"{measure}_id")
    if named.tracked:
        small["tracked"] = np.array([vocabulary[i] for i in named.tracked], dtype=object)
        small["tracked_id"] = np.array(named.tracked, dtype=np.int32)
    if named.sets:
        small["set"] = np.array(list(named.sets), dtype=object)
    if recipe.read.answer:
        for name in ("answer_id", "answer_length"):
            small[name] = np.concatenate([getattr(piece.tokens, name) for piece in pieces])
    placed: Placed = {name: (BY_NAME[name].dims, values) for name, values in small.items()}
    placed["lens"] = (
        (("lens",), object_array(list(lenses))) if len(lenses) > 1 else ((), np.array(lenses[0], dtype=object))
    )
    for name in recipe.columns:
        placed[name] = (("document",), object_array([v for piece in pieces for v in piece.columns[name]]))
    return placed


def placed_marginal(means: Sequence[Array], sizes: Mapping[str, int]) -> Placed:
    """Lay out the marginals of all places, lens by lens."""
    dims = readout_dims(BY_NAME["marginal"], sizes)
    return {"marginal": (dims, np.stack(means).reshape([sizes[dim] for dim in dims]))}


def attributes(recipe: Recipe, facts: ModelFacts, gate: Mapping[str, Any], broken: Mapping[str, int]) -> dict[str, Any]:
    """Say of a dataset what it is, what made it, and how many rows are broken, by lens and site."""
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    return {
        "Conventions": "CF-1.11",
        "title": f"Logit lens of {facts.name}",
        "source": f"lenspipe {version('lenspipe')}",
        "model": facts.name,
        "recipe": json.dumps(recipe.as_dict()),
        "digests": json.dumps({"model": facts.digest, "tokenizer": facts.tokenizer_digest}),
        "gate": json.dumps(gate),
        "nonfinite": json.dumps(broken),
        "versions": json.dumps(versions),
    }
