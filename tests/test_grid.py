"""Grid: which sites a request names, and where a corpus is cut into shards."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenspipe.errors import RequestError
from lenspipe.grid import Site, cut_shards, parse_site, previous_site, select_sites

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

DOCUMENTS = st.lists(st.tuples(st.integers(0, 60), st.binary(min_size=32, max_size=32)), max_size=60)
SIZES = st.integers(1, 80)


def names(sites=None, layers=None, n_blocks=3):
    return [site.name for site in select_sites(sites, layers, n_blocks)]


def text_document(number, random):
    text = f"document {number} " * int(random.integers(5, 100))
    return len(text), hashlib.sha256(text.encode()).digest()


def contents(documents, size):
    starts = [0, *(stops := cut_shards(documents, size))][:-1]
    return {tuple(digest for _, digest in documents[i:j]) for i, j in zip(starts, stops, strict=True)}


def test_the_whole_stream_is_the_default():
    assert names() == ["resid_pre.0", "resid_post.0", "resid_post.1", "resid_post.2"]


def test_a_kind_stands_for_all_its_blocks():
    assert names(["resid_pre"]) == ["resid_pre.0", "resid_pre.1", "resid_pre.2"]
    assert names(["resid_post"]) == ["resid_post.0", "resid_post.1", "resid_post.2"]


def test_explicit_sites_come_in_order_of_depth():
    assert names(["resid_post.2", "resid_pre.0", "resid_pre.2"]) == ["resid_pre.0", "resid_pre.2", "resid_post.2"]


def test_a_site_named_twice_counts_once():
    assert names(["resid_post.1", "resid_post.1"]) == ["resid_post.1"]


def test_layers_choose_by_depth():
    assert names(layers=[0, 2]) == ["resid_pre.0", "resid_post.1"]


@pytest.mark.parametrize("layer, site", [(-1, "resid_post.2"), (-2, "resid_post.1"), (-4, "resid_pre.0")])
def test_negative_layers_count_from_the_last(layer, site):
    assert names(layers=[layer]) == [site]


def test_a_layer_and_its_negative_are_one():
    assert names(layers=[3, -1, 3]) == ["resid_post.2"]


def test_layers_choose_among_the_sites_named():
    assert names(["resid_pre"], [1, 2]) == ["resid_pre.1", "resid_pre.2"]


def test_a_layer_that_no_named_site_has_is_refused():
    with pytest.raises(RequestError, match=r"layer 3 is asked for, but no site in capture\.sites has it"):
        names(["resid_pre"], [1, 3])


@pytest.mark.parametrize("layer", [4, -5, 100])
def test_a_layer_out_of_range_is_refused_with_the_valid_range(layer):
    with pytest.raises(RequestError, match=rf"unknown layer {layer}: .*3 blocks.*from 0 .* to 3 "):
        names(layers=[layer])


@pytest.mark.parametrize("name, meant", [("resid_pst.1", "resid_post"), ("residpre.0", "resid_pre")])
def test_an_unknown_kind_is_refused_with_the_nearest(name, meant):
    with pytest.raises(RequestError, match=rf"unknown site '{name}': .*Did you mean '{meant}'\?"):
        names([name])


def test_a_kind_like_no_other_is_refused_with_all_kinds():
    with pytest.raises(RequestError, match=r"unknown site 'xyz\.1': the kinds are .*resid_pre.*resid_post") as caught:
        names(["xyz.1"])
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("number", ["3", "-1", "", "x", "1.0", "+1", " 1", "²"])
def test_a_block_that_the_model_does_not_have_is_refused_with_the_valid_range(number):
    with pytest.raises(RequestError, match=r"3 blocks, so write resid_post\.0 to resid_post\.2"):
        parse_site(f"resid_post.{number}", 3)


@pytest.mark.parametrize("order", [1, -1])
def test_two_names_of_one_state_are_refused(order):
    with pytest.raises(RequestError, match=r"resid_p\w+\.\d and resid_p\w+\.\d are one state \(layer 5\)") as caught:
        names(["resid_pre.5", "resid_post.4"][::order], n_blocks=8)
    assert "resid_pre.5" in str(caught.value)
    assert "resid_post.4" in str(caught.value)


def test_both_kinds_at_once_are_refused():
    with pytest.raises(RequestError, match="are one state"):
        names(["resid_pre", "resid_post"])


@given(st.integers(0, 200))
def test_layer_counts_the_blocks_applied(block):
    assert Site("resid_pre", block).layer == block
    assert Site("resid_post", block).layer == block + 1


@given(st.integers(0, 200), st.integers(0, 200), st.sampled_from(["resid_pre", "resid_post"]))
def test_sites_share_a_state_exactly_when_they_share_a_layer(i, j, kind):
    left, right = Site("resid_post", i), Site(kind, j)
    assert (left.state == right.state) == (left.layer == right.layer)


def test_the_embeddings_are_a_state_of_their_own():
    assert Site("resid_pre", 0).state == "resid_pre.0"


@given(st.integers(1, 40), st.sampled_from(["resid_pre", "resid_post"]), st.data())
def test_a_name_reads_back_as_its_site(n_blocks, kind, data):
    site = Site(kind, data.draw(st.integers(0, n_blocks - 1)))
    assert parse_site(site.name, n_blocks) == site


@given(DOCUMENTS, SIZES)
def test_shards_hold_every_document_once_and_in_order(documents, size):
    stops = cut_shards(documents, size)
    held = [n for start, stop in zip([0, *stops], stops, strict=False) for n in range(start, stop)]
    assert held == list(range(len(documents)))
    assert all(a < b for a, b in zip([0, *stops], stops, strict=False))


@given(DOCUMENTS, SIZES)
def test_no_shard_but_the_last_is_below_half_the_size(documents, size):
    stops = cut_shards(documents, size)
    for start, stop in list(zip([0, *stops], stops, strict=False))[:-1]:
        assert 2 * sum(length for length, _ in documents[start:stop]) >= size


@given(DOCUMENTS, SIZES)
def test_no_shard_takes_another_document_once_it_holds_twice_the_size(documents, size):
    stops = cut_shards(documents, size)
    for start, stop in zip([0, *stops], stops, strict=False):
        assert sum(length for length, _ in documents[start : stop - 1]) < 2 * size


def test_a_shard_that_no_digest_ends_is_cut_at_twice_the_size():
    assert cut_shards([(10, b"\xff" * 32)] * 47, 100) == [20, 40, 47]


def test_a_shard_that_every_digest_ends_is_cut_at_half_the_size():
    assert cut_shards([(10, bytes(32))] * 12, 100) == [5, 10, 12]


@given(DOCUMENTS, DOCUMENTS, SIZES)
def test_appended_documents_leave_all_but_the_last_shard(documents, more, size):
    before, after = cut_shards(documents, size), cut_shards(documents + more, size)
    assert after[: max(0, len(before) - 1)] == before[:-1]


@given(DOCUMENTS, SIZES)
def test_documents_may_come_as_a_stream(documents, size):
    assert cut_shards(iter(documents), size) == cut_shards(documents, size)


def test_a_typical_shard_has_the_size_asked_for():
    random = np.random.default_rng(3)
    documents = [(100, random.bytes(32)) for _ in range(40_000)]
    stops = cut_shards(documents, 10_000)
    assert 100 * len(documents) / len(stops) == pytest.approx(10_000, rel=0.1)


@pytest.mark.parametrize("where", [0, 700, 1999])
def test_an_inserted_document_changes_only_the_shards_near_it(where):
    random = np.random.default_rng(7)
    documents = [text_document(n, random) for n in range(2000)]
    more = [*documents[:where], text_document(-1, random), *documents[where:]]
    before, after = contents(documents, 5000), contents(more, 5000)
    assert len(before) > 200
    assert 1 <= len(before - after) <= 10
    assert 1 <= len(after - before) <= 10


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20))
def test_documents_of_twice_the_size_stand_alone(digests):
    assert cut_shards([(200, digest) for digest in digests], 100) == list(range(1, len(digests) + 1))


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20), SIZES)
@settings(max_examples=30)
def test_empty_documents_never_end_a_shard(digests, size):
    assert cut_shards([(0, digest) for digest in digests], size) == ([len(digests)] if digests else [])


@pytest.mark.parametrize(
    "name, before",
    [
        ("resid_pre.0", None), ("resid_post.0", "resid_pre.0"), ("resid_post.2", "resid_post.1"),
        ("resid_pre.2", "resid_pre.1"), ("resid_mid.0", None), ("resid_mid.3", "resid_mid.2"), ("attn_out.2", None),
    ],
)  # fmt: skip
def test_the_state_a_block_before(name, before):
    site = parse_site(name, 4)
    found = previous_site(site)
    assert (found and found.name) == before
    assert found is None or found.layer == site.layer - 1
