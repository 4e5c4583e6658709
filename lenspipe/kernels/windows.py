"""Windows: how documents' tokens are cut into sequences, and which rows a shard's cells have.

Row: one kept token. Rows stand in two orders. Document order is the dataset's. Reading order is the order in
which the model sees them: longest sequence first, so that batches pad little; it depends on the shard
alone, never on the batch size. Residuals and readouts are stored in reading order.
Mathematics on arrays only: no tokenizer, no files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """One sequence of a document.

    Attributes:
        ids: token ids as the model sees them.
        context: how many leading ids are there for context only and are counted in an earlier window.
        position: position in the document of the first id that counts.
    """

    ids: tuple[int, ...]
    context: int
    position: int


def cut_windows(ids: Sequence[int], prefix: int, max_length: int, stride: int | None) -> list[Window]:
    """Cut a document into windows so that every token counts exactly once.

    Args:
        ids: the document's token ids, BOS included.
        prefix: 1 if ids begins with BOS, which every later window then repeats as context; else 0.
        max_length: tokens in a window at most.
        stride: new tokens in each window after the first; None for as many as fit.
    """
    step = max_length - prefix if stride is None else min(stride, max_length - prefix)
    windows = [Window(tuple(ids[:max_length]), 0, 0)]
    start = max_length
    while start < len(ids):
        stop = min(start + step, len(ids))
        begin = start if stride is None else max(prefix, stop - (max_length - prefix))
        windows.append(Window((*ids[:prefix], *ids[begin:stop]), prefix + start - begin, start))
        start = stop
    return windows


@dataclass(frozen=True)
class TokenShard:
    """The sequences of a shard, in document order.

    Attributes:
        input_id: ids of all sequences, one after another.
        is_special: per id, whether it is a special token.
        length: per sequence, its number of ids.
        context: per sequence, how many leading ids are context only.
        position: per sequence, the document position of its first counted id.
        document: per sequence, its document's number within the shard.
        sequence: per sequence, its number within its document.
        answer_id: per document, the answer's first token id; -1 where none is asked.
        answer_length: per document, the answer's number of tokens.
    """

    input_id: Ints
    is_special: npt.NDArray[np.bool_]
    length: Ints
    context: Ints
    position: Ints
    document: Ints
    sequence: Ints
    answer_id: Ints
    answer_length: Ints

    def __post_init__(self) -> None:
        sequences = (self.length, self.context, self.position, self.document, self.sequence)
        n, kinds = len(self.answer_id), {array.dtype.name for array in (self.input_id, self.answer_id, *sequences)}
        if (
            kinds != {"int32"}
            or any(array.shape != self.length.shape for array in sequences)
            or not self.input_id.shape == self.is_special.shape == (int(self.length.sum()),)
            or self.answer_length.shape != (n,)
            or (self.length < 1).any()
            or (self.context < 0).any()
            or (self.context >= self.length).any()
            or (self.document < 0).any()
            or (self.document >= n).any()
            or (np.diff(self.document) < 0).any()
            or (self.input_id < 0).any()
        ):
            raise ValueError("the arrays of a token shard do not fit together")

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self.answer_id)

    @property
    def n_tokens(self) -> int:
        """Number of tokens that count, before positions are chosen."""
        return int((self.length - self.context).sum())

    @cached_property
    def offset(self) -> Index:
        """Per sequence, where its ids begin in input_id."""
        return np.concatenate([[0], np.cumsum(self.length, dtype=np.int64)])[:-1]

    @cached_property
    def reading_order(self) -> Index:
        """Sequences as the model sees them: longest first, ties in document order."""
        return np.argsort(-self.length.astype(np.int64), kind="stable")

    def batches(self, batch_tokens: int) -> Iterator[Index]:
        """Group consecutive sequences of the reading order, padded size at most batch_tokens (one at least)."""
        order = self.reading_order
        start = 0
        while start < len(order):
            size = max(1, batch_tokens // int(self.length[order[start]]))
            yield order[start : start + size]
            start += size


@dataclass(frozen=True)
class Rows:
    """The kept tokens of a shard, in document order.

    Attributes:
        input_id, target_id, document, position, sequence, is_special: per row, as in the dataset; target_id is
            -1 at the last position of a sequence, and the others likewise.
        owner: per row, its sequence's number within the shard.
        column: per row, its index in its sequence.
        reading_order: row numbers in reading order.
    """

    input_id: Ints
    target_id: Ints
    target_2_id: Ints
    target_3_id: Ints
    document: Ints
    position: Ints
    sequence: Ints
    is_special: npt.NDArray[np.bool_]
    owner: Index
    column: Index
    reading_order: Index

    @property
    def target_0_id(self) -> Ints:
        """The rows' own tokens."""
        return self.input_id

    def __len__(self) -> int:
        return len(self.input_id)


def select_rows(shard: TokenShard, positions: str | Sequence[int]) -> Rows:
    """List a shard's rows at the positions asked for.

    Args:
        shard: the sequences.
        positions: "all", "last" (of each document), or positions in the document, negative from its end.
            Positions that a document does not have give no row.
    """
    n_ids = len(shard.input_id)
    owner = np.repeat(np.arange(len(shard.length)), shard.length)
    column = np.arange(n_ids) - shard.offset[owner]
    counts = column >= shard.context[owner]
    document = shard.document[owner]
    position = (shard.position[owner] + column - shard.context[owner]).astype(np.int32)
    if positions != "all":
        length = np.bincount(shard.document, shard.length - shard.context, shard.n_documents).astype(np.int64)
        wanted = np.zeros(n_ids, dtype=bool)
        for item in [-1] if positions == "last" else positions:
            wanted |= position == (int(item) if int(item) >= 0 else int(item) + length[document])
        counts &= wanted
    target, target_2, target_3 = (_ahead(shard.input_id, owner, offset) for offset in (1, 2, 3))
    place = np.empty(len(shard.length), dtype=np.int64)
    place[shard.reading_order] = np.arange(len(shard.length))
    chosen: Any = np.flatnonzero(counts)
    return Rows(
        input_id=shard.input_id[chosen],
        target_id=target[chosen],
        target_2_id=target_2[chosen],
        target_3_id=target_3[chosen],
        document=document[chosen],
        position=position[chosen],
        sequence=shard.sequence[owner][chosen],
        is_special=shard.is_special[chosen],
        owner=owner[chosen],
        column=column[chosen],
        reading_order=np.argsort(place[owner[chosen]], kind="stable"),
    )


def _ahead(input_id: Ints, owner: Index, offset: int) -> Ints:
    found = np.full(len(input_id), -1, dtype=np.int32)
    found[:-offset] = np.where(owner[offset:] == owner[:-offset], input_id[offset:], -1)
    return found
