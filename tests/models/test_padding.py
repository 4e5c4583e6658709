"""Padding: a batch gives each row the numbers that it has alone, whatever the family does with positions and masks.

The truth is the model itself, run on one text with neither padding nor mask, its block outputs taken by hooks of our
own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lenspipe.grid import Site
from lenspipe.kernels.windows import TokenShard, cut_windows, select_rows
from lenspipe.models.lens_model import LensModel, open_model
from lenspipe.stages.capture import captured_batches, padded
from lenspipe.stages.encode import token_shard
from tests.families.sweep import blocks_of
from tests.families.tiny import DEPTH, build

ROTARY, LEARNED, ALIBI = ["llama"], ["gpt2", "opt"], ["bloom", "mpt"]
SLIDING, RECURRENT, EXPERTS = ["gemma2", "mistral"], ["mamba", "rwkv", "recurrent_gemma"], ["mixtral"]
ALONE = ["deepseek_v32", "axk2"]
TOGETHER = [*ROTARY, *LEARNED, *ALIBI, *SLIDING, *RECURRENT, *EXPERTS]
FAMILIES = [*TOGETHER, *ALONE]

SITES = [Site("resid_pre", 0), *(Site("resid_post", i) for i in range(DEPTH))]
LAST = SITES[-1]
ROUNDING = 1e-5
LENGTHS = (9, 41, 1, 23)  # past every window of 6, and of more than one chunk of 8


@cache
def opened(family: str) -> LensModel:
    return open_model(build(family))


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(100 * seed + length))


def side_by_side(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(texts):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return ids, mask


@contextmanager
def passing(model: Any) -> Iterator[dict[Site, Tensor]]:
    """What the blocks are given and what they return, by hooks of our own."""
    found: dict[Site, Tensor] = {}
    blocks = blocks_of(model, DEPTH)

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        found[SITES[0]] = (args[0] if args else kwargs["hidden_states"]).clone()

    handles = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    for i, block in enumerate(blocks):

        def after(_module: Any, _args: Any, output: Any, site: Site = SITES[i + 1]) -> None:
            found[site] = (output[0] if isinstance(output, tuple) else output).clone()

        handles.append(block.register_forward_hook(after))
    yield found
    for handle in handles:
        handle.remove()


def alone(model: Any, ids: Tensor) -> tuple[dict[Site, Tensor], Tensor]:
    """One text's states [S, D] and logits [S, V], from the model itself."""
    with passing(model) as found, torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return {site: state.reshape(len(ids), -1) for site, state in found.items()}, logits


def assert_close(ours: Tensor, theirs: Tensor, rounding: float = ROUNDING) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding * float(theirs.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_a_batch_has_the_states_and_logits_that_its_text_has_alone(family: str) -> None:
    model = opened(family)
    texts = [text(length) for length in LENGTHS]
    together = model.states(*side_by_side(texts), SITES)
    for i, ids in enumerate(texts):
        states, logits = alone(model.hf, ids)
        for site in SITES:
            assert_close(together[site][i, : len(ids)], states[site])
        assert_close(model.unembed.logits(together[LAST][i, : len(ids)]), logits, 2 * ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_a_batch_changes_no_row(family: str) -> None:
    model = opened(family)
    texts = [text(length) for length in LENGTHS]
    order = [2, 0, 3, 1]
    one = model.states(*side_by_side(texts), [LAST])[LAST]
    other = model.states(*side_by_side([texts[i] for i in order]), [LAST])[LAST]
    for place, i in enumerate(order):
        n = len(texts[i])
        assert_close(other[place, :n], one[i, :n])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_under_the_padding_changes_no_row(family: str) -> None:
    model = opened(family)
    ids, mask = side_by_side([text(20), text(9)])
    other = torch.where(mask.bool(), ids, 55)
    one, two = (model.states(batch, mask, [LAST])[LAST] for batch in (ids, other))
    assert_close(one[0], two[0])
    assert_close(one[1, :9], two[1, :9])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gate_knows_whether_a_family_can_be_padded(family: str) -> None:
    assert opened(family).gate.pads == (family not in ALONE)


@pytest.mark.parametrize("family", ALONE)
def test_a_family_that_padding_changes_is_run_one_text_at_a_time(family: str) -> None:
    model = opened(family)
    texts = [text(41), text(23)]
    shapes: list[tuple[int, ...]] = []
    handle = model.hf.get_input_embeddings().register_forward_pre_hook(lambda _m, args: shapes.append(args[0].shape))
    together = model.states(*side_by_side(texts), [LAST])[LAST]
    handle.remove()
    assert sorted(shapes) == [(1, 23), (1, 41)]
    for i, ids in enumerate(texts):
        own = model.states(ids[None], torch.ones_like(ids[None]), [LAST])[LAST][0]
        torch.testing.assert_close(together[i, : len(ids)], own, rtol=0, atol=0)


@pytest.mark.parametrize("family", ALONE)
def test_padding_such_a_family_after_all_would_change_its_numbers(family: str) -> None:
    model = opened(family)
    ids, mask = side_by_side([text(41), text(23)])
    with passing(model.hf) as found, torch.no_grad():
        model.hf(input_ids=ids, attention_mask=mask, use_cache=False)
    row, states = found[LAST][1, :23], alone(model.hf, ids[1, :23])[0][LAST]
    assert (row - states).abs().max() > 1e-3 * states.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral", "mixtral", "recurrent_gemma"])
def test_eager_attention_agrees_with_the_fused_kernel_in_a_padded_batch(family: str) -> None:
    fused = opened(family)
    assert fused.hf.config._attn_implementation == "sdpa"
    model = build(family)
    model.set_attn_implementation("eager")
    eager = open_model(model)
    assert eager.hf.config._attn_implementation == "eager"
    texts = [text(length) for length in LENGTHS]
    one, two = (each.states(*side_by_side(texts), SITES) for each in (fused, eager))
    for site in SITES:
        for i, ids in enumerate(texts):
            assert_close(one[site][i, : len(ids)], two[site][i, : len(ids)])


@pytest.mark.parametrize("family", SLIDING)
def test_a_sliding_window_is_narrower_than_these_texts(family: str) -> None:
    """Block 0 of Gemma 2 and every block of Mistral see six tokens: the tests above pass the edge of a window."""
    model = opened(family)
    ids = text(41)
    other = ids.clone()
    other[0] = 96 if ids[0] != 96 else 95
    first = Site("resid_post", 0)
    one, two = (alone(model.hf, each)[0][first] for each in (ids, other))
    changed = ((one - two).abs().amax(dim=1) > 0).nonzero().flatten().tolist()
    assert changed == list(range(6))


def shard_of(documents: Sequence[Tensor], prefix: int, max_length: int, stride: int | None) -> TokenShard:
    windows = [
        (number, i, window)
        for number, ids in enumerate(documents)
        for i, window in enumerate(cut_windows(ids.tolist(), prefix, max_length, stride))
    ]
    return token_shard(windows, [(-1, 0)] * len(documents), frozenset({1}))


def captured(
    model: LensModel, shard: TokenShard, batch_tokens: int, site: Site = LAST
) -> dict[tuple[int, int], tuple[int, Tensor]]:
    """Each kept token's id and state, by its document and position."""
    rows = select_rows(shard, "all")
    batches = captured_batches(model, shard, rows, [site], batch_tokens, lambda _: None)
    states = torch.cat([batch[site] for batch in batches])
    return {
        (int(rows.document[row]), int(rows.position[row])): (int(rows.input_id[row]), state)
        for row, state in zip(rows.reading_order, states, strict=True)
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_tokens", [1, 50, 10_000])
def test_a_shard_in_batches_of_any_size_has_the_states_of_its_documents_one_by_one(
    family: str, batch_tokens: int
) -> None:
    model = opened(family)
    documents = [text(length, seed=1) for length in (7, 25, 1, 16, 7)]
    found = captured(model, shard_of(documents, 0, 64, None), batch_tokens)
    assert len(found) == sum(map(len, documents))
    for number, ids in enumerate(documents):
        states = alone(model.hf, ids)[0][LAST]
        for position, token in enumerate(ids.tolist()):
            token_found, state = found[number, position]
            assert token_found == token
            assert_close(state, states[position], 2 * ROUNDING)


def test_a_batch_is_laid_out_from_the_left_with_zeros_under_a_mask_of_zeros() -> None:
    shard = shard_of([torch.tensor([5, 6]), torch.tensor([7, 8, 9, 10]), torch.tensor([11])], 0, 64, None)
    ids, mask = padded(shard, np.array([1, 2, 0]))
    assert ids.tolist() == [[7, 8, 9, 10], [11, 0, 0, 0], [5, 6, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]


def test_batches_hold_no_more_tokens_than_they_may_unless_one_text_alone_does() -> None:
    shard = shard_of([text(length) for length in (30, 3, 8, 8, 12, 1)], 0, 64, None)
    batches = [padded(shard, batch)[0] for batch in shard.batches(24)]
    assert [tuple(ids.shape) for ids in batches] == [(1, 30), (2, 12), (3, 8)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba", "gemma2", "deepseek_v32"])
@pytest.mark.parametrize("stride", [None, 4])
def test_a_windows_states_are_the_models_own_on_just_its_ids(family: str, stride: int | None) -> None:
    """BOS and context are seen and not counted: windows are cut here by a loop, and each run alone."""
    model = opened(family)
    ids = torch.cat([torch.tensor([1]), text(29, seed=2)])
    found = captured(model, shard_of([ids], 1, 12, stride), 30)
    start, n_new = 12, 11 if stride is None else stride
    expected = list(zip(range(12), alone(model.hf, ids[:12])[0][LAST], strict=True))
    while start < 30:
        stop = min(start + n_new, 30)
        begin = start if stride is None else stop - 11
        states = alone(model.hf, torch.cat([ids[:1], ids[begin:stop]]))[0][LAST]
        expected += zip(range(start, stop), states[start - stop :], strict=True)
        start = stop
    assert [position for position, _ in expected] == list(range(30))
    for position, state in expected:
        assert_close(found[0, position][1], state, 2 * ROUNDING)


def test_context_as_long_as_a_model_can_see_gives_the_states_of_the_whole_document() -> None:
    """Four blocks of windows of 6 see 20 tokens back, and rotary positions are relative: 21 of context are enough."""
    model = opened("mistral")
    ids = text(60, seed=3)
    whole = alone(model.hf, ids)[0][LAST]
    found = captured(model, shard_of([ids], 0, 29, 8), 100)
    for position in range(60):
        assert_close(found[0, position][1], whole[position], 5 * ROUNDING)


@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_without_context_the_states_after_the_first_window_are_others(family: str) -> None:
    model = opened(family)
    ids = text(60, seed=3)
    whole = alone(model.hf, ids)[0][LAST]
    found = captured(model, shard_of([ids], 0, 29, None), 100)
    apart = [float((found[0, i][1] - whole[i]).abs().max() / whole.abs().max()) for i in range(60)]
    assert max(apart[:29]) < ROUNDING
    assert min(apart[29:34]) > 0.01
