"""Plan: what a recipe needs, what of it exists, and what is left to do.

Planning reads the corpus's text and the checkpoint's files, tokenizes nothing, loads no model and imports no torch.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lenspipe.corpora.documents import read_documents
from lenspipe.errors import RequestError, StoreError
from lenspipe.grid import Site, cut_shards, select_sites
from lenspipe.keys import artifact_key, digest
from lenspipe.models.facts import ModelFacts, read_facts
from lenspipe.recipe import Recipe
from lenspipe.stages.work import (
    Cell,
    ShardWork,
    combine,
    dataset_key,
    dataset_path,
    lens_digests,
    resolved_max_length,
    shard_work,
    token_sets,
)
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.variables import BY_NAME, variables_of

CUT = "cut"
CHARACTERS_PER_TOKEN = 4
"""For estimates before a text is tokenized."""


@dataclass(frozen=True)
class Todo:
    """One shard's part of a stage that is left to do.

    Attributes:
        shard: whose.
        cells: which of its cells, for capture and read.
    """

    shard: ShardWork
    cells: tuple[Cell, ...] = ()

    def artifacts(self, stage: str) -> list[tuple[str, str]]:
        """The artifacts that doing it makes: (stage, key)."""
        if stage == "encode":
            return [("encode", self.shard.encode)]
        return [(stage, getattr(cell, stage)) for cell in self.cells]

    @contextmanager
    def claimed(self, store: ArtifactStore, stage: str) -> Iterator[tuple[Cell, ...]]:
        """Claim those of its cells that are not done and that nobody else is doing."""
        with store.claim(stage, [key for _, key in self.artifacts(stage)]) as keys:
            yield tuple(cell for cell in self.cells if getattr(cell, stage) in keys)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a task's parameters."""
        return {"shard": self.shard.as_dict(), "cells": [asdict(cell) for cell in self.cells]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Todo":
        """Undo as_dict."""
        return cls(ShardWork.from_dict(values["shard"]), tuple(Cell(**cell) for cell in values["cells"]))


@dataclass(frozen=True)
class Plan:
    """What to do, and what not.

    Attributes:
        recipe, facts, sites, shards: of the run; shards in order.
        dataset: key of the dataset.
        corpus: digest of the documents' texts.
        encode, capture, read: what is missing, per shard.
        stream: shards, by index, whose reading captures as it goes and stores no residuals.
        assemble: whether the dataset is missing.
        damaged: artifacts that are there but not whole, as "stage key".
        total: per stage, how many artifacts the recipe needs.
        tokens: per shard index, its tokens where it has been encoded.
    """

    recipe: Recipe
    facts: ModelFacts
    sites: tuple[Site, ...]
    shards: tuple[ShardWork, ...]
    dataset: str
    corpus: str
    encode: tuple[Todo, ...]
    capture: tuple[Todo, ...]
    read: tuple[Todo, ...]
    stream: frozenset[int]
    assemble: bool
    damaged: tuple[str, ...]
    total: dict[str, int]
    tokens: dict[int, int]

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.encode or self.capture or self.read or self.assemble)

    @property
    def loads_model(self) -> bool:
        """Whether what is left needs the model's weights."""
        return bool(self.capture or self.read)

    @property
    def dataset_path(self) -> Path:
        """Where the dataset is, or will be."""
        return dataset_path(ArtifactStore(self.recipe.store), self.dataset)

    @property
    def title(self) -> str:
        """The model and the corpus, in short."""
        corpus = self.recipe.corpus
        return f"{self.facts.name} on {Path((corpus.source or [str(corpus.hub)])[0]).name}"

    def artifacts(self) -> list[tuple[str, str]]:
        """All artifacts that the recipe needs, (stage, key), the dataset last."""
        found = [("encode", shard.encode) for shard in self.shards]
        for shard in self.shards:
            found += [("capture", cell.capture) for cell in (*shard.cells, *shard.beside)]
            found += [("read", cell.read) for cell in shard.cells]
        return [*dict.fromkeys(found), ("assemble", self.dataset)]

    def counts(self) -> list[tuple[str, int, int]]:
        """Per stage: artifacts needed, artifacts to be made."""
        todo = {
            "encode": len(self.encode),
            "capture": sum(len(task.cells) for task in self.capture),
            "read": sum(len(task.cells) for task in self.read),
            "assemble": int(self.assemble),
        }
        return [(stage, self.total[stage], todo[stage]) for stage in todo]

    def n_tokens(self, shards: Sequence[ShardWork] | None = None) -> int:
        """Tokens of some shards (all by default), estimated where they have not been encoded."""
        chosen = self.shards if shards is None else shards
        known = sum(s.characters for s in self.shards if s.index in self.tokens)
        per_character = sum(self.tokens.values()) / known if known else 1 / CHARACTERS_PER_TOKEN
        return sum(self.tokens.get(s.index, math.ceil(s.characters * per_character)) for s in chosen)

    def n_rows(self, shards: Sequence[ShardWork] | None = None) -> int:
        """Kept rows of some shards, estimated like n_tokens."""
        chosen = self.shards if shards is None else shards
        positions = self.recipe.capture.positions
        if positions == "all":
            return self.n_tokens(chosen)
        per_document = 1 if positions == "last" else len(positions)
        return min(self.n_tokens(chosen), per_document * sum(s.stop - s.start for s in chosen))

    def work(self) -> int:
        """Cells times rows that are left to read: what most of the time goes with."""
        return sum(self.n_rows([task.shard]) * len(task.cells) for task in self.read)

    def bytes_per_row(self) -> int:
        """Uncompressed size of one (layer, row)'s readouts."""
        sizes = {"k": self.recipe.read.top_k, "tracked": len(self.recipe.read.tracked)}
        sizes["set"] = len(token_sets(self.recipe))
        total = 0
        for variable in variables_of(self.recipe.measures):
            if variable.is_readout:
                total += 4 * (sizes[variable.dims[2]] if len(variable.dims) > 2 else 1)
        return total

    def bytes_to_write(self) -> int:
        """Estimate, uncompressed, of what is left to write."""
        width = (2 if self.facts.dtype == "float16" else 4) * self.facts.d_model
        captured = sum(self.n_rows([task.shard]) * len(task.cells) for task in self.capture) * width
        read = self.work() * self.bytes_per_row()
        cells = len(self.sites) * len(self.recipe.read.lens)
        dataset = self.n_rows() * cells * self.bytes_per_row() if self.assemble else 0
        if "marginal" in self.recipe.measures:
            read += 8 * self.facts.vocab_size * sum(len(task.cells) for task in self.read)
            dataset += 4 * self.facts.vocab_size * cells if self.assemble else 0
        return captured + read + dataset + sum(8 * self.n_tokens([task.shard]) for task in self.encode)

    def files_to_write(self) -> int:
        """Estimate of the files that are left to write."""
        captured = sum(len(task.cells) * 6 for task in self.capture)
        read = sum(len(task.cells) * 2 for task in self.read)
        readouts = sum(variable.is_readout for variable in variables_of(self.recipe.measures))
        return (
            captured
            + read
            + 3 * len(self.encode)
            + (readouts * len(self.sites) * len(self.recipe.read.lens) + 30 if self.assemble else 0)
        )


def make_plan(recipe: Recipe) -> Plan:
    """Find out what a recipe needs and what of it exists.

    Raises:
        RequestError: the recipe asks for something that does not exist or cannot be read.
        ModelError: the checkpoint is not one that can be read.
        UnconvertedError: a GGUF file that has not been converted yet.
    """
    facts = read_facts(recipe)
    _check(recipe, facts)
    layers = None if recipe.capture.layers == "all" else recipe.capture.layers
    sites = select_sites(recipe.capture.sites, layers, facts.n_blocks)
    store = ArtifactStore(recipe.store)
    store.look_again()
    corpus = _read_corpus(recipe)
    cut = _cut(recipe, store, corpus)
    lenses = lens_digests(recipe)
    shards = tuple(_shard(recipe, facts, sites, lenses, corpus, i, *ends) for i, ends in enumerate(pairwise([0, *cut])))
    dataset = dataset_key(recipe, facts, shards)
    damaged: dict[str, None] = {}

    def lacks(stage: str, key: str) -> bool:
        state = store.missing_or_damaged(stage, key)
        if state == "damaged":
            damaged[f"{stage} {key[:12]}"] = None
        return state is not None

    assemble = lacks("assemble", dataset)
    keep = recipe.capture.residuals == "keep"
    tasks: dict[str, list[Todo]] = {"encode": [], "capture": [], "read": []}
    stream = set()
    for shard in shards:
        unread = tuple(cell for cell in shard.cells if assemble and lacks("read", cell.read))
        beside = shard.beside if keep or unread else ()
        sources = {cell.capture: cell for cell in (*(shard.cells if keep else unread), *beside)}
        uncaptured = tuple(cell for key, cell in sources.items() if lacks("capture", key))
        if unread:
            tasks["read"].append(Todo(shard, unread))
        if uncaptured and keep:
            tasks["capture"].append(Todo(shard, uncaptured))
        elif uncaptured:
            stream.add(shard.index)
        if (assemble or uncaptured) and lacks("encode", shard.encode):
            tasks["encode"].append(Todo(shard))
    captures = {cell.capture for shard in shards for cell in (*shard.cells, *shard.beside)}
    n_cells = len(sites) * len(shards) * len(lenses)
    return Plan(
        recipe=recipe,
        facts=facts,
        sites=sites,
        shards=shards,
        dataset=dataset,
        corpus=corpus.digest,
        encode=tuple(tasks["encode"]),
        capture=tuple(tasks["capture"]),
        read=tuple(tasks["read"]),
        stream=frozenset(stream),
        assemble=assemble,
        damaged=tuple(damaged),
        total={"encode": len(shards), "capture": len(captures) if keep else 0, "read": n_cells, "assemble": 1},
        tokens=_known_tokens(store, shards),
    )


def require_room(plan: Plan) -> None:
    """Make sure that the store has room for what is left to do; writes nothing.

    Raises:
        RequestError: it is more than run.max_bytes.
        StoreError: the store has no room.
    """
    root, most = plan.recipe.store, plan.recipe.run.max_bytes
    needed, files = plan.bytes_to_write(), plan.files_to_write()
    less = 'choose fewer layers, measures or documents, or set capture.residuals to "stream"'
    if most is not None and needed > most:
        raise RequestError(f"the run may write {needed:,} bytes, and run.max_bytes is {most:,}: allow more, or {less}")
    disk = os.statvfs(next(folder for folder in (root, *root.parents) if folder.is_dir()))
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise StoreError(
            f"the run needs about {needed / 2**30:.1f} GiB under {root}, and {free / 2**30:.1f} GiB are free: "
            f"make room, or {less}"
        )
    if disk.f_files and files > disk.f_favail:  # some file systems count none
        raise StoreError(
            f"the run needs about {files:,} files under {root}, and the file system has room for "
            f"{disk.f_favail:,}: choose a larger run.shard_size before the corpus is first cut, or {less}"
        )


def publish_cut(plan: Plan) -> None:
    """Remember where the corpus was cut, so that a later run.shard_size does not cut it anew."""
    store, inputs = ArtifactStore(plan.recipe.store), {"corpus": plan.corpus}
    key = artifact_key(CUT, 1, inputs)
    if not store.is_whole(CUT, key):
        with store.publish(CUT, key, inputs) as draft:
            draft.attributes["stops"] = [shard.stop for shard in plan.shards]


def _check(recipe: Recipe, facts: ModelFacts) -> None:
    corpus, read = recipe.corpus, recipe.read
    if corpus.max_length and facts.max_positions and corpus.max_length > facts.max_positions:
        raise RequestError(
            f"corpus.max_length is {corpus.max_length}, and {facts.name} has {facts.max_positions} positions: "
            f"ask for at most {facts.max_positions}"
        )
    if corpus.stride and corpus.stride > resolved_max_length(recipe, facts):
        raise RequestError(
            f"corpus.stride is {corpus.stride}, more than the {resolved_max_length(recipe, facts)} tokens of a sequence"
        )
    if read.top_k > facts.vocab_size:
        raise RequestError(f"read.top_k is {read.top_k}, and {facts.name} has {facts.vocab_size} tokens: ask for fewer")
    for token in read.tracked:
        if isinstance(token, int) and not 0 <= token < facts.vocab_size:
            raise RequestError(f"read.tracked id {token}: {facts.name} has ids 0 to {facts.vocab_size - 1}")
    if reserved := sorted(set(recipe.columns) & (BY_NAME.keys() | {"token", "vocab"})):
        raise RequestError(
            f"column {reserved[0]!r} cannot be kept: the dataset has a variable of that name; rename it in the source"
        )


@dataclass(frozen=True)
class _Corpus:
    """Digests of all documents: texts, kept columns, answers; and the lengths of the texts in characters."""

    contents: list[str]
    columns: list[str]
    answers: list[str]
    characters: list[int]

    @property
    def digest(self) -> str:
        return combine(self.contents)


def _read_corpus(recipe: Recipe) -> _Corpus:
    corpus = _Corpus([], [], [], [])
    for document in read_documents(recipe):
        corpus.contents.append(document.content_digest)
        corpus.columns.append(document.column_digest)
        corpus.answers.append(digest(document.columns[recipe.read.answer]) if recipe.read.answer else "")
        corpus.characters.append(document.characters)
        if not document.characters:
            raise RequestError(f"{document.origin}: the document is empty; remove it")
    if not corpus.contents:
        raise RequestError(
            f"the corpus is empty: {', '.join(recipe.corpus.source) or recipe.corpus.hub} has no documents"
        )
    return corpus


def _cut(recipe: Recipe, store: ArtifactStore, corpus: _Corpus) -> list[int]:
    remembered = store.manifest(CUT, artifact_key(CUT, 1, {"corpus": corpus.digest}))
    if remembered:
        with store.understood(CUT, remembered.key):
            stops = [int(stop) for stop in remembered.attributes["stops"]]
            if stops != sorted({*stops}) or stops[0] < 1 or stops[-1] != len(corpus.contents):
                raise ValueError("the stops are not those of this corpus")
            return stops
    documents = zip(corpus.characters, map(bytes.fromhex, corpus.contents), strict=True)
    return cut_shards(documents, recipe.run.shard_size)


def _shard(
    recipe: Recipe,
    facts: ModelFacts,
    sites: tuple[Site, ...],
    lenses: Mapping[str, str],
    corpus: _Corpus,
    index: int,
    start: int,
    stop: int,
) -> ShardWork:
    within = slice(start, stop)
    return shard_work(
        recipe,
        facts,
        sites,
        lenses,
        (index, start, stop),
        sum(corpus.characters[within]),
        combine(corpus.contents[within]),
        combine(corpus.columns[within]),
        combine(corpus.answers[within]),
    )


def _known_tokens(store: ArtifactStore, shards: Sequence[ShardWork]) -> dict[int, int]:
    tokens = {}
    for shard in shards:
        if found := store.manifest("encode", shard.encode):
            with store.understood("encode", shard.encode):
                tokens[shard.index] = int(found.attributes["tokens"])
    return tokens
