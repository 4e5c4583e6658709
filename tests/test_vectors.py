"""Readout of vectors: agrees with float64 loops and full sorts, broadcasts plainly, refuses before it computes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lenspipe
from lenspipe.errors import RequestError
from lenspipe.kernels import fused, plain
from lenspipe.kernels.head import Arithmetic, Head
from lenspipe.models.lens_model import LensModel, open_model
from lenspipe.models.unembed import Unembed
from lenspipe.vectors import SORT_FROM
from tests.families import tiny

WIDTH, VOCAB = 6, 83
SELECTORS = {
    "top_k": {"top_k": 5},
    "targets": {"targets": [7, 0, 82]},
    "row_targets": {"row_targets": torch.tensor([3, 82, 0, 41, 7, 7, 11])},
    "vocab": {"vocab": range(3, 80)},
}


class Shift(nn.Module):
    """Stands for a norm: keeps numbers on their grid, and counts its calls and rows."""

    def __init__(self, amount: float = 0.5) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.tensor(amount))
        self.calls: list[int] = []

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        self.calls.append(state.shape[1])
        return state + self.amount


class Exploding(nn.Module):
    def forward(self, state: torch.Tensor) -> torch.Tensor:
        raise AssertionError("computed before every argument was checked")


def grid(seed: int, *shape: int) -> torch.Tensor:
    """Numbers whose float32 products are exact, so that equal logits are equal whatever the order of a sum."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-6, 7, shape) / 4).float()


def exact(arithmetic: Arithmetic | None = None, chain: tuple[nn.Module, ...] | None = None) -> Unembed:
    head = Head(grid(1, VOCAB, WIDTH), grid(2, VOCAB), arithmetic or Arithmetic(multiply=0.5))
    return Unembed((Shift(),) if chain is None else chain, head, torch.float32, WIDTH)


def plain_logits(vectors: torch.Tensor) -> np.ndarray:
    """What `exact()` means, in float64: [R, V]."""
    rows = vectors.reshape(-1, WIDTH).double().numpy() + 0.5
    return np.array([[(w @ row + b) * 0.5 for w, b in zip(W, B, strict=True)] for row in rows])


W, B = grid(1, VOCAB, WIDTH).double().numpy(), grid(2, VOCAB).double().numpy()


def plain_logprobs(logits: np.ndarray) -> np.ndarray:
    return np.array(
        [[z - max(row) - math.log(sum(math.exp(y - max(row)) for y in row)) for z in row] for row in logits]
    )


def plain_rank(row: np.ndarray, token: int) -> int:
    return sum(1 for z in row if z > row[token])


def memory_of(n_rows: int, unembed: Unembed, selector: str) -> int:
    """What n rows take: of whole logits where many tokens are read, else as the kernel says."""
    row_bytes = (plain if selector == "vocab" else fused).row_bytes
    return n_rows * row_bytes(unembed.head, 1)[0]


@pytest.fixture(scope="module")
def named() -> LensModel:
    """A model with a tokenizer."""
    return LensModel.load(Path(__file__).parents[1] / "data/tiny-model", device="cpu")


# --- the numbers ---


@pytest.mark.parametrize("values", ["logits", "log_probs", "probs"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_all_measures_agree_with_plain_float64_loops(selector: str, values: Any) -> None:
    vectors = grid(3, 7, WIDTH)
    found = lenspipe.readout(exact(), vectors, values=values, **SELECTORS[selector])
    logits = plain_logits(vectors)
    logprobs = plain_logprobs(logits)
    wanted = {"logits": logits, "log_probs": logprobs, "probs": np.exp(logprobs)}[values]
    ids = found.ids.expand(found.values.shape).tolist()
    for i, row in enumerate(ids):
        np.testing.assert_allclose(found.values[i], wanted[i][row], rtol=2e-6, atol=1e-6)
        assert found.ranks[i].tolist() == [plain_rank(logits[i], token) for token in row]
    np.testing.assert_allclose(found.entropy, -(np.exp(logprobs) * logprobs).sum(1), rtol=1e-5)
    np.testing.assert_allclose(found.logsumexp, np.log(np.exp(logits).sum(1)), rtol=1e-6)
    assert (found.ids.dtype, found.ranks.dtype) == (torch.int64, torch.int32)
    assert {t.dtype for t in (found.values, found.entropy, found.logsumexp)} == {torch.float32}


def test_top_k_is_a_full_sort_with_ties_to_the_lower_id_and_equal_ranks_for_equal_logits() -> None:
    vectors = grid(4, 40, WIDTH)
    found = lenspipe.readout(exact(), vectors, top_k=12)
    ties = 0
    for row, ids, ranks in zip(plain_logits(vectors), found.ids.tolist(), found.ranks.tolist(), strict=True):
        assert ids == sorted(range(VOCAB), key=lambda i: (-row[i], i))[:12]
        assert ranks == [plain_rank(row, i) for i in ids]
        ties += len(set(ranks)) < 12
    assert ties > 10


def test_top_k_may_be_the_whole_vocabulary() -> None:
    found = lenspipe.readout(exact(), grid(4, 2, WIDTH), top_k=VOCAB, values="probs")
    assert found.ids.sort(dim=1).values.tolist() == [list(range(VOCAB))] * 2
    torch.testing.assert_close(found.values.sum(1), torch.ones(2))


def test_the_rank_of_the_argmax_is_0() -> None:
    vectors = grid(5, 9, WIDTH)
    best = torch.from_numpy(plain_logits(vectors).argmax(1))
    assert lenspipe.readout(exact(), vectors, row_targets=best).ranks.tolist() == [[0]] * 9


@pytest.mark.parametrize("n_tokens", [1, SORT_FROM - 1, SORT_FROM, VOCAB])
@pytest.mark.parametrize("values", ["logits", "log_probs", "probs"])
def test_a_subset_is_the_gather_of_the_full_vocabulary_in_the_order_given(n_tokens: int, values: Any) -> None:
    vectors = grid(6, 5, WIDTH)
    order = np.random.default_rng(7).permutation(VOCAB)[:n_tokens].tolist()
    full = lenspipe.readout(exact(), vectors, vocab=range(VOCAB), values=values)
    some = lenspipe.readout(exact(), vectors, vocab=order, values=values)
    assert some.ids.tolist() == order
    assert torch.equal(some.ranks, full.ranks[:, order])
    torch.testing.assert_close(some.values, full.values[:, order], rtol=1e-6, atol=0)
    torch.testing.assert_close(some.entropy, full.entropy, rtol=1e-6, atol=0)


@pytest.mark.parametrize("selector", SELECTORS)
def test_blocks_of_1_3_and_1000_rows_agree(selector: str) -> None:
    vectors, blocks = grid(8, 7, WIDTH), {1: [1] * 7, 3: [3, 3, 1], 1000: [7]}
    found = {}
    for n, sizes in blocks.items():
        unembed = exact()
        found[n] = lenspipe.readout(unembed, vectors, memory=memory_of(n, unembed, selector), **SELECTORS[selector])
        assert unembed.chain[0].calls == sizes
    for n in (1, 3):
        assert torch.equal(found[n].ids, found[1000].ids)
        assert torch.equal(found[n].ranks, found[1000].ranks)
        for name in ("values", "entropy", "logsumexp"):
            torch.testing.assert_close(getattr(found[n], name), getattr(found[1000], name), rtol=0, atol=1e-6)


def test_large_logits_keep_the_digits_of_small_log_probabilities() -> None:
    head = Head(torch.tensor([[1.0], [0.999], [0.9985]]), None, Arithmetic())
    found = lenspipe.readout(
        Unembed((), head, torch.float32, 1), torch.tensor([4096.0]), vocab=[0, 1, 2], values="probs"
    )
    logits = torch.tensor([1.0, 0.999, 0.9985]).double() * 4096
    torch.testing.assert_close(found.values, logits.softmax(0).float(), rtol=1e-6, atol=0)


# --- families ---


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "cohere", "granite"])
def test_the_last_state_reads_as_the_models_own_logits(family: str) -> None:
    model = tiny.build(family)
    opened = open_model(model)
    ids = torch.tensor([5, 17, 3, 88, 41])
    state = opened.capture(ids, [f"resid_post.{tiny.DEPTH - 1}"])[f"resid_post.{tiny.DEPTH - 1}"]
    with torch.no_grad():
        own = model(ids[None]).logits[0]
    found = lenspipe.readout(opened, state, vocab=range(own.shape[1]))
    torch.testing.assert_close(found.values, own, rtol=0, atol=2e-5)
    bare = lenspipe.readout(opened, state, vocab=range(own.shape[1]), apply_norm=False)
    assert (bare.values - own).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_scale_and_softcap_are_applied_once_and_raw_leaves_them_out(family: str) -> None:
    model = tiny.build(family)
    vectors = 4 * torch.randn(3, tiny.WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        bare = model.lm_head(model.model.norm(vectors)).double()
    capped = (bare / 3).tanh() * 3 if family == "gemma2" else bare * 0.3
    opened = open_model(model)
    everything = range(bare.shape[1])
    found, raw = (lenspipe.readout(opened, vectors, vocab=everything, raw=raw).values for raw in (False, True))
    torch.testing.assert_close(found.double(), capped, rtol=0, atol=1e-5)
    torch.testing.assert_close(raw.double(), bare, rtol=0, atol=1e-5)
    assert (raw - found).abs().max() > 1


def test_a_bfloat16_models_vectors_are_read_in_float32_logits_without_ties() -> None:
    opened = open_model(tiny.build("llama", torch.bfloat16))
    vectors = torch.randn(50, tiny.WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = lenspipe.readout(opened, vectors, vocab=range(tiny.VOCAB))
    with torch.no_grad():
        normed = opened.hf.model.norm(vectors).double().numpy()
    wanted = normed @ opened.hf.lm_head.weight.detach().double().numpy().T
    np.testing.assert_allclose(found.values, wanted, atol=1e-5)
    assert found.ranks.sort(dim=1).values.tolist() == [list(range(tiny.VOCAB))] * 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_vectors_may_be_of_any_float(dtype: torch.dtype) -> None:
    vectors = grid(9, 3, WIDTH)  # exact in all of them
    found = lenspipe.readout(exact(), vectors.to(dtype), top_k=3)
    assert torch.equal(found.values, lenspipe.readout(exact(), vectors, top_k=3).values)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_numpy_arrays_are_read_as_tensors_are_whatever_their_layout(dtype: str) -> None:
    array = np.ascontiguousarray(grid(9, WIDTH, 3).numpy().astype(dtype)).T[::-1]
    array.flags.writeable = False
    found = lenspipe.readout(exact(), array, top_k=3)
    assert torch.equal(found.values, lenspipe.readout(exact(), torch.tensor(array.copy()).float(), top_k=3).values)


# --- shapes and selectors ---


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 1, 3)])
def test_results_have_the_leading_shape_of_the_vectors(shape: tuple[int, ...]) -> None:
    vectors = grid(10, *shape, WIDTH)
    shared = lenspipe.readout(exact(), vectors, targets=[4, 5])
    assert (shared.ids.shape, shared.values.shape, shared.ranks.shape) == ((2,), (*shape, 2), (*shape, 2))
    best = lenspipe.readout(exact(), vectors, top_k=3)
    assert (best.ids.shape, best.values.shape, best.ranks.shape) == ((*shape, 3),) * 3
    own = lenspipe.readout(exact(), vectors, row_targets=torch.full(shape, 4))
    assert (own.ids.shape, own.values.shape, own.ranks.shape) == ((*shape, 1),) * 3
    assert torch.equal(own.values[..., 0], shared.values[..., 0])
    assert shared.entropy.shape == shared.logsumexp.shape == shared.broken.shape == shape == shared.shape


@pytest.mark.parametrize(
    "targets", [5, np.int64(5), torch.tensor(5), torch.tensor([5], dtype=torch.int32), np.array([5]), [5], (5,)]
)
def test_a_shared_target_may_be_given_in_any_plain_form(targets: Any) -> None:
    found = lenspipe.readout(exact(), grid(10, 2, WIDTH), targets=targets)
    assert found.ids.tolist() == [5]
    assert found.values.shape == (2, 1)


@pytest.mark.parametrize("shape", [(2, 3), (3,), (1, 3), (2, 1), (1,), ()])
def test_row_targets_broadcast_to_the_rows_aligned_at_the_right(shape: tuple[int, ...]) -> None:
    ids = np.arange(10, 10 + math.prod(shape)).reshape(shape)
    vectors = grid(11, 2, 3, WIDTH)
    logits = plain_logits(vectors).reshape(2, 3, VOCAB)
    found = lenspipe.readout(exact(), vectors, row_targets=torch.from_numpy(ids).int())
    wanted = np.broadcast_to(ids, (2, 3))
    assert np.array_equal(found.ids[..., 0], wanted)
    for i, j in np.ndindex(2, 3):
        assert found.values[i, j, 0] == pytest.approx(logits[i, j, wanted[i, j]])
        assert found.ranks[i, j, 0] == plain_rank(logits[i, j], wanted[i, j])


def test_a_missing_row_target_has_rank_minus_1_and_no_value() -> None:
    found = lenspipe.readout(exact(), grid(11, 3, WIDTH), row_targets=[4, -1, 9], values="probs")
    assert found.ids.tolist() == [[4], [-1], [9]]
    assert found.values.isnan().tolist() == [[False], [True], [False]]
    assert (found.ranks[:, 0] < 0).tolist() == [False, True, False]
    assert not found.broken.any()
    assert torch.isfinite(found.entropy).all()


def test_tokens_by_string_and_by_id_agree(named: LensModel) -> None:
    vectors = torch.randn(2, named.facts.d_model, generator=torch.Generator().manual_seed(0))
    by_string = lenspipe.readout(named, vectors, targets=[" the", 300])
    ids = [*named.tokenizer.pieces(" the"), 300]
    by_id = lenspipe.readout(named.unembed, vectors, targets=ids)
    assert by_string.ids.tolist() == by_id.ids.tolist() == ids
    assert torch.equal(by_string.values, by_id.values)
    alone = lenspipe.readout(named, vectors, vocab=" the")
    assert torch.equal(alone.ranks, by_id.ranks[:, :1])


def test_an_unembed_spells_strings_with_the_tokenizer_given(named: LensModel) -> None:
    vectors = torch.ones(named.facts.d_model)
    for tokenizer in (named.tokenizer, named.tokenizer.hf):
        found = lenspipe.readout(named.unembed, vectors, targets=" the", tokenizer=tokenizer)
        assert found.tokens().tolist() == [" the"]


# --- broken rows ---


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_vector_with_nan_or_infinity_gives_no_number_and_is_said(
    selector: str, what: float, softcap: float | None
) -> None:
    vectors = grid(12, 7, WIDTH)
    sound = lenspipe.readout(exact(Arithmetic(softcap=softcap)), vectors, **SELECTORS[selector])
    vectors[4, 2] = what
    found = lenspipe.readout(exact(Arithmetic(softcap=softcap)), vectors, **SELECTORS[selector])
    assert found.broken.tolist() == [i == 4 for i in range(7)]
    assert found.values[4].isnan().all()
    assert found.entropy[4].isnan()
    assert (found.ranks[4] == -1).all()
    assert selector != "top_k" or (found.ids[4] == -1).all()
    assert "1 of 7 rows broken" in repr(found)
    keep = [0, 1, 2, 3, 5, 6]
    assert torch.equal(found.values[keep], sound.values[keep])
    assert torch.equal(found.ranks[keep], sound.ranks[keep])


def test_a_softcap_does_not_hide_an_infinite_vector() -> None:
    head = Head(torch.tensor([[1.0, 2.0], [3.0, -4.0]]), None, Arithmetic(softcap=3.0))
    unembed = Unembed((), head, torch.float32, 2)
    vectors = torch.tensor([[math.inf, 1.0], [1.0, 1.0]], dtype=torch.float64)
    vectors = torch.cat([vectors, torch.tensor([[1e300, 1.0]], dtype=torch.float64)])  # infinite in float32
    assert torch.isfinite(unembed.logits(vectors)).all()
    assert lenspipe.readout(unembed, vectors, top_k=1).broken.tolist() == [True, False, True]


def test_sound_rows_are_not_called_broken() -> None:
    found = lenspipe.readout(exact(), grid(12, 3, WIDTH), top_k=1)
    assert not found.broken.any()
    assert "broken" not in repr(found)


@pytest.mark.parametrize("grad", [False, True])
def test_a_logit_of_minus_infinity_is_a_probability_of_0(grad: bool) -> None:
    bias = torch.zeros(VOCAB)
    bias[[3, 8]] = -math.inf
    unembed = Unembed((), Head(grid(1, VOCAB, WIDTH), bias, Arithmetic()), torch.float32, WIDTH)
    vectors = grid(13, 2, WIDTH).requires_grad_(grad)
    found = lenspipe.readout(unembed, vectors, vocab=[3, 8, 0], values="probs", grad=grad)
    logits = vectors.detach().double().numpy() @ W.T
    kept = np.delete(logits, [3, 8], axis=1)
    logprobs = plain_logprobs(kept)
    assert found.ranks[:, :2].tolist() == [[VOCAB - 2] * 2] * 2
    assert found.values[:, :2].tolist() == [[0, 0]] * 2
    np.testing.assert_allclose(found.entropy.detach(), -(np.exp(logprobs) * logprobs).sum(1), rtol=1e-5)
    assert not found.broken.any()
    if grad:
        (gradient,) = torch.autograd.grad(found.entropy.sum() + found.values.sum(), vectors)
        assert torch.isfinite(gradient).all()


# --- gradients ---


def plain_gemma2(model: Any, vectors: torch.Tensor) -> torch.Tensor:
    """Norm, unembedding and softcap, written out in float64."""
    weight = model.model.norm.weight.detach().double()
    normed = vectors * (vectors.square().mean(-1, keepdim=True) + tiny.EPSILON).rsqrt() * (1 + weight)
    return 3 * (normed @ model.lm_head.weight.detach().double().T / 3).tanh()


@pytest.mark.parametrize("what", ["logits", "log_probs", "probs", "entropy", "logsumexp"])
@pytest.mark.parametrize("selector", ["targets", "row_targets", "top_k"])
def test_gradients_are_those_of_a_plain_float64_computation(what: str, selector: str) -> None:
    model = tiny.build("gemma2")
    vectors = torch.randn(2, 2, tiny.WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    chosen = {"targets": [4, 9], "row_targets": torch.tensor([[5, 6], [7, 8]]), "top_k": 3}[selector]
    values: Any = what if what in ("logits", "log_probs", "probs") else "logits"
    found = lenspipe.readout(open_model(model), vectors, grad=True, values=values, **{selector: chosen})
    (ours,) = torch.autograd.grad((getattr(found, what) if what != values else found.values).sum(), vectors)
    precise = vectors.detach().double().requires_grad_()
    logits = plain_gemma2(model, precise)
    logprobs = logits - logits.exp().sum(-1, keepdim=True).log()
    index = found.ids.expand(found.values.shape)
    wanted = {
        "logits": logits.gather(-1, index),
        "log_probs": logprobs.gather(-1, index),
        "probs": logprobs.exp().gather(-1, index),
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "logsumexp": logits.exp().sum(-1).log(),
    }[what]
    (theirs,) = torch.autograd.grad(wanted.sum(), precise)
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("selector", SELECTORS)
def test_numbers_with_and_without_gradient_are_the_same(selector: str) -> None:
    vectors = grid(14, 7, WIDTH)
    plain = lenspipe.readout(exact(), vectors, values="log_probs", **SELECTORS[selector])
    graph = lenspipe.readout(exact(), vectors.requires_grad_(), values="log_probs", grad=True, **SELECTORS[selector])
    for name in ("ids", "values", "ranks", "entropy", "logsumexp"):
        torch.testing.assert_close(getattr(graph, name).detach(), getattr(plain, name), rtol=0, atol=1e-6)
    assert repr(graph).splitlines()[0] == repr(plain).splitlines()[0]
    assert len(graph.to_dataframe()) == plain.values.numel()


def test_without_grad_there_is_no_graph_even_where_vectors_ask_for_one() -> None:
    found = lenspipe.readout(exact(), grid(14, 2, WIDTH).requires_grad_(), top_k=2)
    assert not any(t.requires_grad for t in (found.values, found.entropy, found.logsumexp))


def test_optimising_a_residual_brings_a_token_to_rank_0_and_leaves_the_model_frozen() -> None:
    model = tiny.build("llama")
    opened = open_model(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    residual = torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(1))
    start = lenspipe.readout(opened, residual, vocab=range(tiny.VOCAB))
    target = int(start.ids[start.ranks.argmax()])
    residual.requires_grad_()
    optimizer = torch.optim.Adam([residual], lr=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        (-lenspipe.readout(opened, residual, targets=target, values="log_probs", grad=True).values.sum()).backward()
        optimizer.step()
    assert start.ranks[target] == tiny.VOCAB - 1
    assert lenspipe.readout(opened, residual, targets=target).ranks.tolist() == [0]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- refusals ---

GOOD: dict[str, Any] = {"vectors": torch.ones(2, 3, WIDTH), "top_k": 3}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"top_k": None}, "exactly one of top_k, targets, row_targets, vocab; found none"),
    ({"targets": [1]}, "found top_k and targets"),
    ({"vocab": [1]}, "found top_k and vocab"),
    ({"top_k": 0}, "top_k is 0: .* 1 to 83"),
    ({"top_k": VOCAB + 1}, "top_k is 84"),
    ({"top_k": True}, "top_k is True"),
    ({"top_k": 2.0}, "top_k is 2.0"),
    ({"values": "logprobs"}, "values is 'logprobs': it must be one of logits, log_probs, probs"),
    ({"vectors": torch.ones(2, WIDTH + 1)}, r"shape \(2, 7\).*width 6"),
    ({"vectors": torch.tensor(1.0)}, r"shape \(\).*width 6"),
    ({"vectors": torch.ones(0, WIDTH)}, r"shape \(0, 6\): there is no row"),
    ({"vectors": torch.ones(2, WIDTH, dtype=torch.int64)}, "floating-point numbers, found torch.int64"),
    ({"vectors": torch.ones(2, WIDTH, dtype=torch.bool)}, "floating-point numbers, found torch.bool"),
    ({"vectors": np.ones((2, WIDTH), dtype=int)}, "floating-point numbers, found int64"),
    ({"vectors": [[1.0] * WIDTH]}, "a tensor or a numpy array; found list"),
    ({"grad": True}, "vectors.requires_grad_"),
    ({"memory": 10}, "memory is 10 bytes, but one row takes"),
    ({"memory": 1e9}, "memory is 1000000000.0: .* whole number"),
    ({"top_k": None, "targets": []}, "targets is empty"),
    ({"top_k": None, "targets": [VOCAB]}, "targets: id 83, but the vocabulary has ids 0 to 82"),
    ({"top_k": None, "targets": -1}, "targets: id -1"),
    ({"top_k": None, "targets": 2**70}, "targets: id 1180591620717411303424"),
    ({"top_k": None, "targets": [1.0]}, "an id or a string; found 1.0"),
    ({"top_k": None, "targets": True}, "an id or a string; found True"),
    ({"top_k": None, "targets": torch.tensor([1.0])}, "targets must be integers; found torch.float32"),
    ({"top_k": None, "targets": torch.ones(2, 3).long()}, r"found shape \(2, 3\)\. .*row_targets"),
    ({"top_k": None, "targets": " the"}, "' the' needs a tokenizer"),
    ({"top_k": None, "vocab": [4, 5, 4]}, "vocab names id 4 more than once"),
    ({"top_k": None, "vocab": torch.tensor([], dtype=torch.int64)}, "vocab is empty"),
    ({"top_k": None, "vocab": [5, 99]}, "vocab: id 99"),
    ({"top_k": None, "row_targets": torch.ones(2, dtype=torch.int64)}, r"shape \(2,\) do not broadcast .*\(2, 3\)"),
    ({"top_k": None, "row_targets": torch.ones(1, 2, 3).long()}, r"shape \(1, 2, 3\) do not broadcast"),
    ({"top_k": None, "row_targets": torch.full((2, 3), -2)}, "row_targets: id -2.*-1 for none"),
    ({"top_k": None, "row_targets": torch.full((2, 3), VOCAB)}, "row_targets: id 83"),
    ({"top_k": None, "row_targets": torch.ones(2, 3)}, "row_targets must be integers; found torch.float32"),
    ({"top_k": None, "row_targets": torch.ones(2, 3) > 0}, "row_targets must be integers; found torch.bool"),
    ({"top_k": None, "row_targets": ["a", "b", "c"]}, "row_targets must be token ids"),
]


@pytest.mark.parametrize("change, message", WRONG)
def test_every_argument_is_checked_before_anything_is_computed(change: dict[str, Any], message: str) -> None:
    arguments = GOOD | change
    with pytest.raises(RequestError, match=f"(?s){message}"):
        lenspipe.readout(exact(chain=(Exploding(),)), **arguments)


def test_the_exploding_chain_explodes_where_arguments_are_right() -> None:
    with pytest.raises(AssertionError, match="computed before"):
        lenspipe.readout(exact(chain=(Exploding(),)), **GOOD)


def test_grad_inside_no_grad_is_refused() -> None:
    with torch.no_grad(), pytest.raises(RequestError, match=r"inside torch\.no_grad"):
        lenspipe.readout(exact(chain=(Exploding(),)), torch.ones(WIDTH, requires_grad=True), top_k=1, grad=True)


def test_what_is_not_a_model_behind_the_gate_is_refused() -> None:
    with pytest.raises(RequestError, match="found Linear: open the model"):
        lenspipe.readout(nn.Linear(2, 2), torch.ones(2), top_k=1)  # type: ignore[arg-type]


def test_a_string_of_several_tokens_is_refused_naming_them(named: LensModel) -> None:
    text = " quite a few words"
    with pytest.raises(RequestError, match=rf"is {len(named.tokenizer.pieces(text))} tokens"):
        lenspipe.readout(named, torch.ones(named.facts.d_model), targets=[300, text])


# --- the result ---


class Spelling:
    """A tokenizer of a few tokens, some of which a page or a terminal must not take at their word."""

    names = ("a", " b", "<script>", "\n", "&", "e'")

    def __len__(self) -> int:
        return len(self.names)

    def batch_decode(self, ids: list[list[int]], clean_up_tokenization_spaces: bool) -> list[str]:
        assert not clean_up_tokenization_spaces
        return [self.names[i] for (i,) in ids]


def test_tokens_are_spelled_in_the_shape_of_the_ids_and_unknown_ones_are_empty() -> None:
    found = lenspipe.readout(exact(), grid(15, 2, 2, WIDTH), row_targets=[[0, -1], [82, 5]], tokenizer=Spelling())
    assert found.tokens().tolist() == [[["a"], [""]], [[""], ["e'"]]]
    shared = lenspipe.readout(exact(), grid(15, 2, WIDTH), targets=[1, 4], tokenizer=Spelling())
    assert shared.tokens().tolist() == [" b", "&"]


def test_tokens_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(RequestError, match="pass tokenizer="):
        lenspipe.readout(exact(), torch.ones(WIDTH), top_k=1).tokens()


@pytest.mark.parametrize("selector", [{"top_k": 4}, {"targets": [3, 1]}, {"row_targets": [1, 2, 3]}])
def test_the_table_has_one_line_for_each_row_and_token(selector: dict[str, Any]) -> None:
    found = lenspipe.readout(exact(), grid(16, 2, 3, WIDTH), tokenizer=Spelling(), **selector)
    table = found.to_dataframe()
    assert list(table.columns) == ["dim_0", "dim_1", "k", "token", "id", "value", "rank"]
    assert len(table) == found.values.numel()
    ids = found.ids.expand(found.values.shape)
    for line in table.itertuples():
        place = (line.dim_0, line.dim_1, line.k)
        assert (line.id, line.value, line.rank) == (ids[place], found.values[place], found.ranks[place])
        assert line.token == (Spelling.names[line.id] if line.id < len(Spelling.names) else "")


def test_the_table_of_one_vector_without_a_tokenizer_has_no_dims_and_no_tokens() -> None:
    table = lenspipe.readout(exact(), grid(16, WIDTH), top_k=4).to_dataframe()
    assert list(table.columns) == ["k", "id", "value", "rank"]
    assert table["k"].tolist() == [0, 1, 2, 3]


def test_a_readout_at_a_glance_shows_tokens_in_quotes_values_and_ranks() -> None:
    vectors = grid(17, 2, WIDTH)
    found = lenspipe.readout(exact(), vectors, row_targets=[1, -1], tokenizer=Spelling())
    caption, header, first, second = repr(found).splitlines()
    assert caption == "Readout [2] x 1: logits, #rank; entropy in nats"
    assert header.split() == ["row", "entropy", "0"]
    assert first == f"[0]  {found.entropy[0]:.3f}    ' b' {found.values[0, 0]:.4g} #{found.ranks[0, 0]}"
    assert second == f"[1]  {found.entropy[1]:.3f}    -"
    shared = lenspipe.readout(exact(), vectors, targets=[3, 82], tokenizer=Spelling())
    assert repr(shared).splitlines()[1].split() == ["row", "entropy", r"'\n'", "82"]


def test_a_large_readout_at_a_glance_is_short_and_says_what_it_leaves_out() -> None:
    found = lenspipe.readout(exact(), grid(18, 30, 10, WIDTH), top_k=40)
    lines = repr(found).splitlines()
    assert len(lines) == 11
    assert max(map(len, lines)) < 120
    assert lines[-1] == "... and 292 more rows, and 35 more tokens in each row"
    assert lines[-1] in found._repr_html_()


def test_a_notebook_is_given_tokens_escaped() -> None:
    found = lenspipe.readout(exact(), grid(18, 2, WIDTH), targets=[2, 4], tokenizer=Spelling())
    page = found._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "&amp;" in page
    assert page.count("<tr>") == 3
