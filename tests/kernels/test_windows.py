"""Windows: every token counts once, and a shard's rows are those of plain loops over its windows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenspipe.kernels.windows import TokenShard, Window, cut_windows, select_rows

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

BOS = 99


@st.composite
def cuts(draw):
    """A document and how to cut it: ids, prefix, max_length, stride."""
    prefix = draw(st.integers(0, 1))
    ids = [BOS] * prefix + draw(st.lists(st.integers(0, 5), min_size=1, max_size=40))
    max_length = draw(st.integers(2, 12))
    return ids, prefix, max_length, draw(st.one_of(st.none(), st.integers(1, max_length)))


@st.composite
def shards(draw):
    """A shard's windows, per document, all cut in one way."""
    max_length = draw(st.integers(2, 9))
    stride = draw(st.one_of(st.none(), st.integers(1, max_length)))
    documents = []
    for _ in range(draw(st.integers(1, 6))):
        prefix = draw(st.integers(0, 1))
        ids = [BOS] * prefix + draw(st.lists(st.integers(0, 5), min_size=1, max_size=25))
        documents.append(cut_windows(ids, prefix, max_length, stride))
    return documents


def shard_of(documents):
    listed = [(d, s, window) for d, windows in enumerate(documents) for s, window in enumerate(windows)]
    ids = np.array([i for *_, window in listed for i in window.ids], dtype=np.int32)
    return TokenShard(
        input_id=ids,
        is_special=ids == BOS,
        length=np.array([len(window.ids) for *_, window in listed], dtype=np.int32),
        context=np.array([window.context for *_, window in listed], dtype=np.int32),
        position=np.array([window.position for *_, window in listed], dtype=np.int32),
        document=np.array([d for d, *_ in listed], dtype=np.int32),
        sequence=np.array([s for _, s, _ in listed], dtype=np.int32),
        answer_id=np.full(len(documents), -1, dtype=np.int32),
        answer_length=np.zeros(len(documents), dtype=np.int32),
    )


def plain_rows(documents, wanted):
    """List (input, target, document, position, sequence, owner, column) of every row that is wanted."""
    found, owner = [], 0
    for d, windows in enumerate(documents):
        n_tokens = sum(len(window.ids) - window.context for window in windows)
        for s, window in enumerate(windows):
            for column in range(window.context, len(window.ids)):
                position = window.position + column - window.context
                target = window.ids[column + 1] if column + 1 < len(window.ids) else -1
                if wanted(position, n_tokens):
                    found.append((window.ids[column], target, d, position, s, owner, column))
            owner += 1
    return found


def rows_as_tuples(rows):
    columns = (rows.input_id, rows.target_id, rows.document, rows.position, rows.sequence, rows.owner, rows.column)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(cuts())
def test_every_token_counts_once_and_in_order(cut):
    windows = cut_windows(*cut)
    assert [i for window in windows for i in window.ids[window.context :]] == cut[0]


@given(cuts())
def test_position_is_where_a_windows_first_counted_token_stands(cut):
    counted = 0
    for window in cut_windows(*cut):
        assert window.position == counted
        counted += len(window.ids) - window.context


@given(cuts())
def test_no_window_is_longer_than_allowed_or_without_a_counted_token(cut):
    for window in cut_windows(*cut):
        assert len(window.ids) <= cut[2]
        assert window.context < len(window.ids)


@given(cuts())
def test_a_short_document_is_one_window(cut):
    ids, prefix, max_length, stride = cut
    if len(ids) <= max_length:
        assert cut_windows(ids, prefix, max_length, stride) == [Window(tuple(ids), 0, 0)]


@given(cuts())
def test_every_later_window_begins_with_bos_where_the_document_does(cut):
    ids, prefix, *_ = cut
    for window in cut_windows(*cut)[1:]:
        assert window.context >= prefix
        assert list(window.ids[:prefix]) == ids[:prefix]


@given(cuts())
def test_context_is_the_tokens_just_before(cut):
    ids, prefix, *_ = cut
    for window in cut_windows(*cut)[1:]:
        length = window.context - prefix
        assert list(window.ids[prefix : window.context]) == ids[window.position - length : window.position]
        assert window.position - length >= prefix  # so BOS is never there twice


@given(cuts())
def test_without_a_stride_context_is_bos_alone_and_windows_are_full(cut):
    ids, prefix, max_length, _ = cut
    windows = cut_windows(ids, prefix, max_length, None)
    assert all(window.context == prefix for window in windows[1:])
    assert all(len(window.ids) == max_length for window in windows[:-1])


@given(cuts(), st.integers(1, 12))
def test_with_a_stride_later_windows_are_full_and_count_at_most_as_many_tokens(cut, stride):
    ids, prefix, max_length, _ = cut
    windows = cut_windows(ids, prefix, max_length, stride)
    step = min(stride, max_length - prefix)
    for window in windows[1:]:
        assert len(window.ids) == max_length
        assert len(window.ids) - window.context <= stride
    for window in windows[1:-1]:
        assert len(window.ids) - window.context == step


def test_windows_of_an_example_are_those_written_by_hand():
    ids = [BOS, 1, 2, 3, 4, 5, 6, 7]
    assert cut_windows(ids, 1, 4, None) == [
        Window((BOS, 1, 2, 3), 0, 0),
        Window((BOS, 4, 5, 6), 1, 4),
        Window((BOS, 7), 1, 7),
    ]
    assert cut_windows(ids, 1, 4, 2) == [
        Window((BOS, 1, 2, 3), 0, 0),
        Window((BOS, 3, 4, 5), 2, 4),
        Window((BOS, 5, 6, 7), 2, 6),
    ]
    assert cut_windows(ids[1:], 0, 3, 2) == [
        Window((1, 2, 3), 0, 0),
        Window((3, 4, 5), 1, 3),
        Window((5, 6, 7), 1, 5),
    ]


@given(shards())
def test_a_shard_counts_its_documents_and_tokens(documents):
    shard = shard_of(documents)
    assert shard.n_documents == len(documents)
    assert shard.n_tokens == sum(len(w.ids) - w.context for windows in documents for w in windows)


@given(shards())
def test_offset_is_where_a_sequences_ids_begin(documents):
    shard = shard_of(documents)
    windows = [window for windows in documents for window in windows]
    for window, offset, length in zip(windows, shard.offset, shard.length, strict=True):
        assert tuple(shard.input_id[offset : offset + length].tolist()) == window.ids


@given(shards())
def test_reading_order_is_longest_first_then_as_in_the_documents(documents):
    shard = shard_of(documents)
    assert shard.reading_order.tolist() == sorted(range(len(shard.length)), key=lambda s: (-shard.length[s], s))


@given(shards(), st.integers(1, 60))
def test_batches_hold_every_sequence_once_in_reading_order_whatever_their_size(documents, batch_tokens):
    shard = shard_of(documents)
    assert np.concatenate(list(shard.batches(batch_tokens))).tolist() == shard.reading_order.tolist()


@given(shards(), st.integers(1, 60))
def test_a_batch_is_within_its_budget_padding_included_unless_it_is_one_sequence(documents, batch_tokens):
    shard = shard_of(documents)
    for batch in shard.batches(batch_tokens):
        assert len(batch) == 1 or len(batch) * shard.length[batch].max() <= batch_tokens


@given(shards(), st.integers(1, 60))
def test_a_batch_takes_all_that_its_budget_allows(documents, batch_tokens):
    shard = shard_of(documents)
    for batch in list(shard.batches(batch_tokens))[:-1]:
        assert (len(batch) + 1) * shard.length[batch].max() > batch_tokens


@given(shards())
def test_all_positions_are_all_counted_tokens(documents):
    rows = select_rows(shard_of(documents), "all")
    assert rows_as_tuples(rows) == plain_rows(documents, lambda position, n_tokens: True)
    assert len(rows) == shard_of(documents).n_tokens


@given(shards())
def test_the_last_position_is_the_last_of_each_document(documents):
    rows = select_rows(shard_of(documents), "last")
    assert rows_as_tuples(rows) == plain_rows(documents, lambda position, n_tokens: position == n_tokens - 1)
    assert len(rows) == len(documents)


@given(shards(), st.lists(st.integers(-30, 30), max_size=5))
@settings(max_examples=200)
def test_listed_positions_count_from_either_end_and_once(documents, positions):
    def wanted(position, n_tokens):
        return any(position == (p if p >= 0 else n_tokens + p) for p in positions)

    assert rows_as_tuples(select_rows(shard_of(documents), positions)) == plain_rows(documents, wanted)


def test_positions_that_no_document_has_give_no_rows():
    rows = select_rows(shard_of([cut_windows([1, 2, 3], 0, 2, None)]), [3, -4, 1000])
    assert len(rows) == 0
    assert len(rows.reading_order) == 0


@given(shards(), st.sampled_from(["all", "last", [0, 3, -1, -2]]))
def test_special_tokens_keep_their_mark(documents, positions):
    rows = select_rows(shard_of(documents), positions)
    assert rows.is_special.tolist() == [i == BOS for i in rows.input_id.tolist()]


@given(shards(), st.sampled_from(["all", "last", [0, 3, -1, -2]]))
def test_rows_in_reading_order_follow_their_sequences_longest_first(documents, positions):
    shard = shard_of(documents)
    rows = select_rows(shard, positions)
    expected = sorted(range(len(rows)), key=lambda r: (-shard.length[rows.owner[r]], rows.owner[r], rows.column[r]))
    assert rows.reading_order.tolist() == expected


@given(shards(), st.integers(1, 60))
def test_rows_in_reading_order_are_those_of_one_batch_after_another(documents, batch_tokens):
    shard = shard_of(documents)
    rows = select_rows(shard, [0, 2, -1])
    owners = rows.owner.tolist()
    by_batch = [
        row
        for batch in shard.batches(batch_tokens)
        for sequence in batch.tolist()
        for row in range(len(rows))
        if owners[row] == sequence
    ]
    assert rows.reading_order.tolist() == by_batch


def test_the_last_position_of_a_sequence_has_no_target_even_inside_a_document():
    documents = [cut_windows([BOS, 1, 2, 3, 4], 1, 3, None), cut_windows([5, 6], 0, 3, None)]
    rows = select_rows(shard_of(documents), "all")
    assert rows.input_id.tolist() == [BOS, 1, 2, 3, 4, 5, 6]
    assert rows.target_id.tolist() == [1, 2, -1, 4, -1, 6, -1]


def test_the_target_of_a_chosen_position_is_the_next_token_though_it_is_not_chosen():
    rows = select_rows(shard_of([cut_windows([7, 8, 9], 0, 5, None)]), [0, -2])
    assert rows.input_id.tolist() == [7, 8]
    assert rows.target_id.tolist() == [8, 9]


def test_rows_are_stored_in_the_declared_types():
    rows = select_rows(shard_of([cut_windows(list(range(9)), 0, 4, 2)]), "all")
    for name in ("input_id", "target_id", "document", "position", "sequence"):
        assert getattr(rows, name).dtype == np.int32, name
    for name in ("owner", "column", "reading_order"):
        assert getattr(rows, name).dtype == np.int64, name
    assert rows.is_special.dtype == np.bool_


@pytest.mark.parametrize("positions", ["all", "last", [0]])
def test_a_shard_of_no_sequences_has_no_rows(positions):
    assert len(select_rows(shard_of([]), positions)) == 0
    assert list(shard_of([]).batches(8)) == []
