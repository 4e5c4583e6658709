"""Work: what one shard needs, as plain values: the only thing a stage is told.

Keys of all results are computed here, from the recipe and digests alone: no text is tokenized and no model loaded to
know them. This module computes names; the stages compute results.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lenspipe.corpora.token_sets import load_token_sets
from lenspipe.errors import RequestError
from lenspipe.grid import Site, parse_site, previous_site
from lenspipe.keys import artifact_key, digest
from lenspipe.lenses.files import lens_digest
from lenspipe.models.facts import ModelFacts
from lenspipe.models.tokenizer import CHAT_DATE
from lenspipe.recipe import Parts, Recipe, lens_name
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.variables import AGAINST_FINAL

SAMPLE = "sample"
"""Stage of what a store holds later runs to; see stages.sample."""

STAGES = ("encode", "capture", "read", "assemble")
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
        beside: cells whose residuals some measure compares with.
        final: key of the last layer's residuals, where that is among them.
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
    beside: tuple[Cell, ...]
    final: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a task's parameters."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ShardWork":
        """Undo as_dict."""
        cells = {name: tuple(Cell(**cell) for cell in values[name]) for name in ("cells", "beside")}
        return cls(**{**values, **cells})


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """Tokens that a recipe names, as ids.

    Attributes:
        tracked: in the order of the recipe.
        sets: name -> its tokens.
    """

    tracked: tuple[int, ...]
    sets: dict[str, tuple[int, ...]]

    @classmethod
    def find(cls, recipe: Recipe, single: Callable[[str | int], int]) -> "NamedTokens":
        """Turn names into ids.

        Args:
            recipe: with read.tracked and read.token_sets.
            single: finds the id of one token, or raises RequestError.

        Raises:
            RequestError: a name that is no token, two names of one token in a set, or an unreadable file.
        """
        sets = {}
        for name, tokens in token_sets(recipe).items():
            sets[name] = tuple(single(token) for token in tokens)
            if twice := [token for i, token in zip(sets[name], tokens, strict=True) if sets[name].count(i) > 1]:
                raise RequestError(f"{recipe.read.token_sets}: {twice[0]!r} and {twice[1]!r} of {name!r} are one token")
        return cls(tuple(single(token) for token in recipe.read.tracked), sets)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a task's parameters."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "NamedTokens":
        """Undo as_dict."""
        return cls(tuple(values["tracked"]), {name: tuple(ids) for name, ids in values["sets"].items()})


def token_sets(recipe: Recipe) -> dict[str, list[str | int]]:
    """Read the token sets of a recipe: name -> tokens as they are written.

    Raises:
        RequestError: an unreadable file.
    """
    return load_token_sets(recipe.path(recipe.read.token_sets)) if recipe.read.token_sets else {}


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
        "chat": corpus.messages is not None and {"date": CHAT_DATE},
        "max_length": resolved_max_length(recipe, facts),
        "overflow": corpus.overflow,
        "stride": corpus.stride,
        "bos": corpus.bos,
    }


def encode_inputs(recipe: Recipe, facts: ModelFacts, contents: str, columns: str) -> dict[str, Any]:
    """All that decides an encode artifact: the tokens, and what is kept beside them."""
    answer = {"column": recipe.read.answer, "prefix": recipe.read.answer_prefix} if recipe.read.answer else None
    return {"tokens": token_inputs(recipe, facts, contents), "columns": columns, "answer": answer}


def model_inputs(recipe: Recipe, facts: ModelFacts) -> dict[str, Any]:
    """All that decides what a model computes of given tokens."""
    return {
        "model": facts.digest,
        "dtype": facts.dtype,
        "attention": recipe.model.attention,
        **({} if recipe.model.parts == Parts() else {"parts": recipe.model.parts.model_dump()}),
    }


def capture_inputs(recipe: Recipe, facts: ModelFacts, tokens: str, site: Site) -> dict[str, Any]:
    """All that decides a cell's residuals."""
    positions = recipe.capture.positions
    return {
        **model_inputs(recipe, facts),
        "tokens": tokens,
        "state": site.state,
        "positions": positions if isinstance(positions, str) else sorted(set(positions)),
        **({} if recipe.capture.nonfinite == "refuse" else {"nonfinite": recipe.capture.nonfinite}),
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
        **({"sets": token_sets(recipe)} if read.token_sets else {}),
        "answers": {"texts": answers, "prefix": read.answer_prefix} if read.answer else None,
        **({} if read.precision == "model" else {"precision": read.precision}),
    }


def stage_inputs(recipe: Recipe, facts: ModelFacts) -> dict[str, dict[str, Any]]:
    """All that decides each stage's results but the documents and the state that is read."""
    tokens = token_inputs(recipe, facts, "")
    encode = encode_inputs(recipe, facts, "", "") | tokens
    capture = capture_inputs(recipe, facts, "", Site("resid_pre", 0))
    read = read_inputs(recipe, "", "", "", "") | {"lens": lens_digests(recipe), "uncovered": recipe.read.uncovered}
    own = {
        "encode": {"columns": list(recipe.columns), "answer": encode["answer"]} | tokens,
        "capture": capture,
        "read": read,
        "assemble": {"vocabulary": facts.tokenizer_digest, "columns": list(recipe.columns)},
    }
    of_a_shard = {"contents", "tokens", "state", "capture", "final", "answers"}
    return {
        stage: {"version": VERSION[stage]} | {name: own[stage][name] for name in own[stage] if name not in of_a_shard}
        for stage in STAGES
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

    beside = sites_beside(recipe.measures, sites, facts)
    captures = {site: capture_key(site) for site in {*sites, *beside}}
    final = captures[last_site(facts)] if recipe.measures & AGAINST_FINAL else None

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
        tuple(cell(site, next(iter(lenses))) for site in beside),
        final,
    )


def last_site(facts: ModelFacts) -> Site:
    """The state that enters the final norm."""
    return Site("resid_post", facts.n_blocks - 1)


def sites_beside(measures: frozenset[str], sites: Iterable[Site], facts: ModelFacts) -> tuple[Site, ...]:
    """List the states that measures compare these sites with."""
    last = [last_site(facts)] if measures & AGAINST_FINAL else []
    previous = [previous_site(site) for site in sites] if "cosine_previous" in measures else []
    return tuple(dict.fromkeys([*last, *(site for site in previous if site)]))


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
