"""Encode: documents -> one shard of token ids, cut into sequences.

Artifact: a table (see kernels.windows.TokenShard) and `columns.json`, the kept columns' values per document.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np

from lenspipe.corpora.documents import Document, read_documents
from lenspipe.errors import RequestError
from lenspipe.kernels.windows import TokenShard, Window, cut_windows
from lenspipe.models.facts import ModelFacts
from lenspipe.models.tokenizer import Tokenizer
from lenspipe.recipe import Recipe
from lenspipe.stages.work import ShardWork, combine, encode_inputs, resolved_max_length
from lenspipe.storage.arrays import read_table, write_table
from lenspipe.storage.artifacts import ArtifactStore

COLUMNS = "columns.json"


def encode(
    store: ArtifactStore,
    recipe: Recipe,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    shards: Sequence[ShardWork],
    report: Callable[[int], None],
) -> None:
    """Tokenize shards and publish them, reading the corpus once.

    Args:
        store, recipe, facts, tokenizer: of the run.
        shards: in order; those that are done, or claimed by another run, are passed over.
        report: told the tokens of each shard as it is done.

    Raises:
        RequestError: a document that cannot be tokenized as asked, or a corpus that changed since it was planned.
    """
    documents = enumerate(read_documents(recipe))
    for shard in shards:
        with store.claim("encode", [shard.encode]) as mine:
            if mine:
                wanted = list(islice((item for n, item in documents if n >= shard.start), shard.stop - shard.start))
                report(_encode(store, recipe, facts, tokenizer, shard, wanted))


def _encode(
    store: ArtifactStore,
    recipe: Recipe,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    shard: ShardWork,
    wanted: Sequence[Document],
) -> int:
    digests = combine(d.content_digest for d in wanted), combine(d.column_digest for d in wanted)
    if digests != (shard.contents, shard.columns):
        raise RequestError("the corpus changed while it was being read: run again when its files are at rest")
    tokens = encode_documents(wanted, recipe, resolved_max_length(recipe, facts), tokenizer)
    inputs = encode_inputs(recipe, facts, shard.contents, shard.columns)
    with store.publish("encode", shard.encode, inputs) as draft:
        write_table(draft.folder, {f.name: getattr(tokens, f.name) for f in fields(TokenShard)})
        kept = {name: [item.columns[name] for item in wanted] for name in recipe.columns}
        (draft.folder / COLUMNS).write_text(json.dumps(kept), encoding="utf-8")
        draft.attributes.update(documents=len(wanted), tokens=tokens.n_tokens, sequences=len(tokens.length))
    return tokens.n_tokens


def load_tokens(store: ArtifactStore, key: str) -> TokenShard:
    """Read a shard's tokens back.

    Raises:
        DamagedArtifactError: absent or damaged.
    """
    table = read_table(store, "encode", key)
    with store.understood("encode", key):
        return TokenShard(**table)


def load_columns(store: ArtifactStore, key: str) -> dict[str, list[Any]]:
    """Read a shard's kept columns back: name -> value per document."""
    folder, manifest = store.open("encode", key, checked="")
    with store.understood("encode", key):
        found: dict[str, list[Any]] = json.loads((folder / COLUMNS).read_text(encoding="utf-8"))
        if any(len(values) != manifest.attributes["documents"] for values in found.values()):
            raise ValueError("a column has another length than there are documents")
        return found


def encode_documents(
    documents: Iterable[Document], recipe: Recipe, max_length: int, tokenizer: Tokenizer
) -> TokenShard:
    """Tokenize documents into one shard.

    Raises:
        RequestError: a document without tokens, too long under overflow = "error", or with a doubled BOS.
    """
    windows: list[tuple[int, int, Window]] = []
    answers: list[tuple[int, int]] = []
    for number, document in enumerate(documents):
        found = _windows(document, recipe, max_length, tokenizer)
        windows += [(number, i, window) for i, window in enumerate(found)]
        answers.append(_answer(document.columns, recipe, tokenizer))
    return token_shard(windows, answers, tokenizer.special_ids)


def token_shard(
    windows: Sequence[tuple[int, int, Window]], answers: Sequence[tuple[int, int]], special: frozenset[int]
) -> TokenShard:
    """Lay windows out as one shard.

    Args:
        windows: number of the document, number of the window in it, window.
        answers: per document, first id and number of ids of its answer; -1 and 0 where there is none.
        special: ids that are special tokens.
    """
    ids = np.array([i for *_, window in windows for i in window.ids], dtype=np.int32)
    return TokenShard(
        input_id=ids,
        is_special=np.isin(ids, sorted(special)),
        length=_int32(len(window.ids) for *_, window in windows),
        context=_int32(window.context for *_, window in windows),
        position=_int32(window.position for *_, window in windows),
        document=_int32(number for number, *_ in windows),
        sequence=_int32(i for _, i, _ in windows),
        answer_id=_int32(first for first, _ in answers),
        answer_length=_int32(length for _, length in answers),
    )


def _windows(document: Document, recipe: Recipe, max_length: int, tokenizer: Tokenizer) -> list[Window]:
    corpus = recipe.corpus
    ids, prefix = tokenizer.encode(document.content, corpus.bos, document.origin)
    if len(ids) > max_length and corpus.overflow == "error":
        raise RequestError(
            f"{document.origin}: {len(ids)} tokens, and corpus.max_length is {max_length}: shorten it, or set "
            'corpus.overflow to "split" or "truncate"'
        )
    if corpus.overflow == "truncate":
        ids = ids[:max_length]
    return cut_windows(ids, prefix, max_length, corpus.stride)


def _answer(columns: Mapping[str, Any], recipe: Recipe, tokenizer: Tokenizer) -> tuple[int, int]:
    if not recipe.read.answer:
        return -1, 0
    return tokenizer.answer(columns[recipe.read.answer], recipe.read.answer_prefix)


def _int32(values: Iterator[int]) -> Any:
    return np.fromiter(values, dtype=np.int32)
