"""Work: what one shard needs, as plain values: the only thing a stage is told.

Keys of all results are computed here, from the recipe and digests alone: no text is tokenized and no model loaded to
know them. This module computes names; the stages compute results.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lenspipe.grid import Site, parse_site
from lenspipe.keys import artifact_key, digest
from lenspipe.lenses.files import lens_digest
from lenspipe.models.facts import ModelFacts
from lenspipe.recipe import Parts, Recipe, lens_name
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.variables import AGAINST_FINAL

VERSION = {"encode": 1, "capture": 1, "read": 2, "assemble": 2}
"""The version of each stage's numbers: raise one, and its results and all that rest on them are redone."""

DEFAULT_MAX_LENGTH = 1024
DATASET = "dataset.zarr"

Place = tuple[str, str]
"""Names of a lens and a site."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One site of one shard, read with one lens.

    Attributes:
        site: its name.
        lens: name of the lens.
        capture, read: keys of its residuals, which all lenses share, and of its readouts.
    """

    site: str
    lens: str
    capture: str
    read: str


@dataclass(frozen=True, slots=True)
class ShardWork:
    """One shard with the keys of all its results.

    Attributes:
        index: number of the shard.
        start, stop: its documents.
        characters: of its documents together.
        contents, columns, answers: digests of its documents' texts, kept columns and answers.
        tokens: digest of all that decides its token ids.
        encode: key of its encode artifact.
        cells: lens by lens, the selected sites in order of depth.
        final: the cell of the last layer, when a measure needs it.
    """

    index: int
    start: int
    stop: int
    characters: int
    contents: str
    columns: str
    answers: str
    tokens: str
    encode: str
    cells: tuple[Cell, ...]
    final: Cell | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a task's parameters."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ShardWork":
        """Undo as_dict."""
        final = values["final"] and Cell(**values["final"])
        return cls(**{**values, "cells": tuple(Cell(**cell) for cell in values["cells"]), "final": final})


def combine(digests: Iterable[str]) -> str:
    """Digest a list of digests."""
    combined = hashlib.sha256()
    for item in digests:
        combined.update(item.encode("ascii") + b"\n")
    return combined.hexdigest()


def resolved_max_length(recipe: Recipe, facts: ModelFacts) -> int:
    """Tokens in a sequence at most: as asked, else 1024 or the model's limit."""
    return recipe.corpus.max_length or min(DEFAULT_MAX_LENGTH, facts.max_positions or DEFAULT_MAX_LENGTH)


def lens_digests(recipe: Recipe) -> dict[str, str]:
    """Name the lenses of a recipe: name -> digest, or "logit". Imports no torch.

    Raises:
        RequestError: a path with no lens of a known format.
    """
    sources = recipe.read.lens
    return {lens_name(s): "logit" if s == "logit" else lens_digest(recipe.path(s)) for s in sources}


def token_inputs(recipe: Recipe, facts: ModelFacts, contents: str) -> dict[str, Any]:
    """All that decides a shard's token ids."""
    corpus = recipe.corpus
    return {
        "contents": contents,
        "tokenizer": facts.tokenizer_digest,
        "chat": corpus.messages is not None,
        "max_length": resolved_max_length(recipe, facts),
        "overflow": corpus.overflow,
        "stride": corpus.stride,
        "bos": corpus.bos,
    }


def encode_inputs(recipe: Recipe, facts: ModelFacts, contents: str, columns: str) -> dict[str, Any]:
    """All that decides an encode artifact: the tokens, and what is kept beside them."""
    answer = {"column": recipe.read.answer, "prefix": recipe.read.answer_prefix} if recipe.read.answer else None
    return {"tokens": token_inputs(recipe, facts, contents), "columns": columns, "answer": answer}


def capture_inputs(recipe: Recipe, facts: ModelFacts, tokens: str, site: Site) -> dict[str, Any]:
    """All that decides a cell's residuals."""
    positions = recipe.capture.positions
    return {
        "model": facts.digest,
        "dtype": facts.dtype,
        "attention": recipe.model.attention,
        "tokens": tokens,
        "state": site.state,
        "positions": positions if isinstance(positions, str) else sorted(set(positions)),
        **({} if recipe.model.parts == Parts() else {"parts": recipe.model.parts.model_dump()}),
    }


def read_inputs(recipe: Recipe, capture: str, final: str | None, answers: str, lens: str) -> dict[str, Any]:
    """All that decides a cell's readouts; `lens` is its digest, or "logit"."""
    read = recipe.read
    return {
        "capture": capture,
        "final": final,
        "lens": lens if lens == "logit" else {"digest": lens, "uncovered": read.uncovered},
        "measures": sorted(recipe.measures),
        "top_k": read.top_k if "topk" in read.measures else None,
        "tracked": read.tracked,
        "answers": {"texts": answers, "prefix": read.answer_prefix} if read.answer else None,
        **({} if read.precision == "model" else {"precision": read.precision}),
    }


def shard_work(
    recipe: Recipe,
    facts: ModelFacts,
    sites: tuple[Site, ...],
    lenses: Mapping[str, str],
    place: tuple[int, int, int],
    characters: int,
    contents: str,
    columns: str,
    answers: str,
) -> ShardWork:
    """Compute all keys of one shard.

    Args:
        recipe, facts, sites: of the run.
        lenses: name -> digest, or "logit".
        place: number of the shard, its first document, the document after its last.
        characters: of its documents.
        contents, columns, answers: digests of its documents' texts, kept columns and answers.
    """
    encode = artifact_key("encode", VERSION["encode"], encode_inputs(recipe, facts, contents, columns))
    tokens = digest({"version": VERSION["encode"], **token_inputs(recipe, facts, contents)})

    def capture_key(site: Site) -> str:
        return artifact_key("capture", VERSION["capture"], capture_inputs(recipe, facts, tokens, site))

    last = Site("resid_post", facts.n_blocks - 1)
    captures = {site: capture_key(site) for site in {*sites, last}}
    final = captures[last] if recipe.measures & AGAINST_FINAL else None

    def cell(site: Site, lens: str) -> Cell:
        inputs = read_inputs(recipe, captures[site], final, answers, lenses[lens])
        return Cell(site.name, lens, captures[site], artifact_key("read", VERSION["read"], inputs))

    return ShardWork(
        *place,
        characters,
        contents,
        columns,
        answers,
        tokens,
        encode,
        tuple(cell(site, lens) for lens in lenses for site in sites),
        cell(last, next(iter(lenses))) if final else None,
    )


def sites_of(cells: Iterable[Cell], facts: ModelFacts) -> tuple[Site, ...]:
    """Turn cells back into sites."""
    return tuple(parse_site(cell.site, facts.n_blocks) for cell in cells)


def dataset_inputs(recipe: Recipe, facts: ModelFacts, shards: Iterable[ShardWork]) -> dict[str, Any]:
    """All that decides the dataset."""
    return {
        "vocabulary": facts.tokenizer_digest,
        "columns": list(recipe.columns),
        "shards": [
            {"encode": shard.encode, "read": [[cell.lens, cell.site, cell.read] for cell in shard.cells]}
            for shard in shards
        ],
    }


def dataset_key(recipe: Recipe, facts: ModelFacts, shards: Iterable[ShardWork]) -> str:
    """Name the dataset."""
    return artifact_key("assemble", VERSION["assemble"], dataset_inputs(recipe, facts, shards))


def dataset_path(store: ArtifactStore, key: str) -> Path:
    """Where a dataset is, or would be."""
    return store.path("assemble", key) / DATASET
