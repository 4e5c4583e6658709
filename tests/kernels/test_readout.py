"""Readout: every measure agrees with plain float64 loops, and no broken row gives a number."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lenspipe.errors import RequestError
from lenspipe.kernels import fused, plain, readout
from lenspipe.kernels.head import Arithmetic, Head, Request, logits
from lenspipe.kernels.plain import divergence, log_softmax, logit_and_rank, top_k
from lenspipe.kernels.readout import rows_per_block
from lenspipe.variables import MEASURES, OFFSETS, variables_of

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

OF_STATES = {"residual_norm", "cosine_final", "cosine_previous"}
ALL = frozenset(MEASURES) - OF_STATES - set(OFFSETS) | {"target", "tracked", "token_sets", "answer"}
ARITHMETICS = [
    Arithmetic(),
    Arithmetic(multiply=0.375),
    Arithmetic(divide=3.0),
    Arithmetic(softcap=5.0),
    Arithmetic(multiply=1.75, divide=0.625, softcap=7.5),
    Arithmetic(multiply=-0.5, softcap=2.0),
]


WAY = {"read": plain}


@pytest.fixture(params=[fused, plain], ids=["fused", "plain"], scope="module", autouse=True)
def _every_way(request):
    WAY["read"] = request.param


def read_rows(head, states, request, target, answer, final=None):
    """Read rows at one place, in the way under test; `final` are the last layer's states."""
    places = states[None] if final is None else torch.stack([states, final])
    asked = {"target": target, "answer": answer}
    asked = {name: ids for name, ids in asked.items() if name in request.measures}
    found = WAY["read"].read_rows(head, places, request, asked, None if final is None else 1)
    return {name: values[0] for name, values in found.items()}


class Case:
    """Operands on a coarse grid, so that float32 products are exact and equal logits are exactly equal."""

    def __init__(self, seed, n_rows, width, n_vocab, arithmetic, with_bias=True):
        draw = np.random.default_rng(seed)
        self.weight = draw.integers(-6, 7, (n_vocab, width)) / 4
        self.bias = draw.integers(-8, 9, n_vocab) / 8 if with_bias else None
        self.states = draw.integers(-6, 7, (n_rows, width)) / 4
        self.final = draw.integers(-6, 7, (n_rows, width)) / 4
        self.target = draw.integers(-1, n_vocab, n_rows)
        self.answer = draw.integers(-1, n_vocab, n_rows)
        self.tracked = tuple(int(i) for i in draw.integers(0, n_vocab, 3))
        self.sets = (self.tracked[:1], tuple(range(n_vocab)))
        self.arithmetic = arithmetic

    @property
    def head(self):
        bias = None if self.bias is None else torch.tensor(self.bias, dtype=torch.float32)
        return Head(torch.tensor(self.weight, dtype=torch.float32), bias, self.arithmetic)

    def read(self, k, measures=ALL, rows=slice(None)):
        head = self.head
        states, final = (torch.tensor(x[rows], dtype=torch.float32) for x in (self.states, self.final))
        target, answer = (torch.tensor(x[rows], dtype=torch.int64) for x in (self.target, self.answer))
        return read_rows(head, states, Request(measures, k, self.tracked, self.sets), target, answer, final)

    def plain_logits(self, state):
        found = []
        for v, weights in enumerate(self.weight):
            z = sum(float(a) * float(b) for a, b in zip(state, weights, strict=True))
            z += 0.0 if self.bias is None else float(self.bias[v])
            z *= 1.0 if self.arithmetic.multiply is None else self.arithmetic.multiply
            z /= 1.0 if self.arithmetic.divide is None else self.arithmetic.divide
            if self.arithmetic.softcap is not None:
                z = self.arithmetic.softcap * math.tanh(z / self.arithmetic.softcap)
            found.append(z)
        return found


def plain_logprobs(z):
    top = max(z)
    total = top + math.log(math.fsum(math.exp(v - top) for v in z))
    return total, [v - total for v in z]


def plain_rank(z, token):
    return -1 if token < 0 else sum(1 for v in z if v > z[token])


def plain_value(z, token):
    return math.nan if token < 0 else z[token]


def exact(rows, final=None):
    """A head and states whose logits are `rows`, bit for bit, and states whose logits are `final`."""
    values = torch.tensor(np.asarray(rows if final is None else [*rows, *final]), dtype=torch.float32)
    head, states = Head(values.T.contiguous(), None, Arithmetic()), torch.eye(len(values))
    return (head, states) if final is None else (head, states[: len(rows)], states[len(rows) :])


def nobody(n_rows):
    return torch.full((n_rows,), -1, dtype=torch.int64)


def measure(rows, *measures, k=1):
    head, states = exact(rows)
    return read_rows(head, states, Request(frozenset(measures), k), nobody(len(rows)), nobody(len(rows)), states)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from(ARITHMETICS),
    st.booleans(),
    st.data(),
)
@settings(max_examples=150)
def test_every_measure_is_that_of_plain_float64_loops(seed, n_rows, width, n_vocab, arithmetic, with_bias, data):
    case = Case(seed, n_rows, width, n_vocab, arithmetic, with_bias)
    k = data.draw(st.integers(1, n_vocab))
    found = case.read(k)
    for r in range(n_rows):
        z = case.plain_logits(case.states[r])
        lse, q = plain_logprobs(z)
        p = plain_logprobs(case.plain_logits(case.final[r]))[1]
        ids = sorted(range(n_vocab), key=lambda v: (-z[v], v))[:k]
        close = {"rtol": 1e-5, "atol": 2e-5, "equal_nan": True}
        assert found["topk_id"][r].tolist() == ids
        np.testing.assert_allclose(found["topk_logit"][r], [z[v] for v in ids], **close)
        np.testing.assert_allclose(found["logsumexp"][r], lse, **close)
        np.testing.assert_allclose(found["entropy"][r], -sum(math.exp(v) * v for v in q), **close)
        kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        np.testing.assert_allclose(found["kl_final"][r], kl, **close)
        kl = sum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True))
        np.testing.assert_allclose(found["kl_reverse"][r], kl, **close)
        middle = [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in zip(p, q, strict=True)]
        js = sum(math.exp(x) * (x - m) / 2 for y in (p, q) for x, m in zip(y, middle, strict=True))
        np.testing.assert_allclose(found["js_final"][r], js, **close)
        mean = sum(math.exp(v) * v for v in q)
        np.testing.assert_allclose(found["varentropy"][r], sum(math.exp(v) * (v - mean) ** 2 for v in q), **close)
        np.testing.assert_allclose(found["renyi2"][r], -math.log(math.fsum(math.exp(2 * v) for v in q)), **close)
        largest = [*sorted(z, reverse=True), -math.inf]
        np.testing.assert_allclose(found["margin"][r], largest[0] - largest[1], **close)
        masses = [sum(math.exp(q[v]) for v in tokens) for tokens in case.sets]
        np.testing.assert_allclose(found["set_mass"][r], masses, **close)
        last = case.plain_logits(case.final[r])
        first = min(range(n_vocab), key=lambda v: (-last[v], v))
        assert found["final_top1_rank"][r] == plain_rank(z, first)
        np.testing.assert_allclose(found["final_top1_logit"][r], z[first], **close)
        for name, token in (("target", case.target[r]), ("answer", case.answer[r])):
            assert found[f"{name}_rank"][r] == plain_rank(z, token)
            np.testing.assert_allclose(found[f"{name}_logit"][r], plain_value(z, token), **close)
        assert found["tracked_rank"][r].tolist() == [plain_rank(z, token) for token in case.tracked]
        np.testing.assert_allclose(found["tracked_logit"][r], [z[token] for token in case.tracked], **close)


@pytest.mark.parametrize("measures", [{"topk"}, {"target", "entropy"}, {"js_final"}, {"tracked", "margin"}, ALL])
def test_measures_bring_their_variables_and_no_others_in_the_declared_types(measures):
    case = Case(1, 4, 3, 20, ARITHMETICS[4])
    found = case.read(5, frozenset(measures))
    declared = {v.name: v for v in variables_of(frozenset(measures)) if v.is_readout}
    assert found.keys() == declared.keys()
    lengths = {"k": 5, "tracked": 3, "set": 2}
    for name, values in found.items():
        assert str(values.dtype) == f"torch.{declared[name].dtype}"
        assert values.shape == (4, *(lengths[dim] for dim in declared[name].dims[2:]))


def test_log_probabilities_stand_beside_every_logit_and_keep_the_digits_of_large_ones():
    rows = np.array([[4096.0, 4095.5, 4094.25, -3.0]], np.float32)
    head, states = exact(rows)
    measures = frozenset({"topk", "target", "tracked", "logprob"})
    found = read_rows(head, states, Request(measures, 2, (3, 1)), torch.tensor([2]), nobody(1))
    expected = plain_logprobs(rows[0].tolist())[1]
    np.testing.assert_allclose(found["topk_logprob"][0], expected[:2], rtol=1e-6)
    np.testing.assert_allclose(found["target_logprob"][0], expected[2], rtol=1e-6)
    np.testing.assert_allclose(found["tracked_logprob"][0], [expected[3], expected[1]], rtol=1e-6)


def test_a_measure_alone_is_the_same_as_among_all():
    case = Case(2, 6, 5, 33, ARITHMETICS[4])
    together = case.read(4)
    for name in ALL:
        for variable, values in case.read(4, frozenset({name})).items():
            torch.testing.assert_close(values, together[variable], rtol=0, atol=0, equal_nan=True)


def test_arithmetic_multiplies_then_divides_then_caps():
    found = Arithmetic(multiply=3.0, divide=2.0, softcap=4.0).apply_(torch.tensor([[5.0, -1.0]]))
    np.testing.assert_allclose(found[0], [4 * math.tanh(7.5 / 4), 4 * math.tanh(-1.5 / 4)], rtol=1e-6)


def test_arithmetic_names_its_steps():
    assert str(Arithmetic()) == "none"
    assert str(Arithmetic(multiply=0.25, softcap=30.0)) == "multiply 0.25, then softcap 30"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_half_precision_are_read_in_float32(dtype):
    draw = torch.Generator().manual_seed(5)
    head = Head(torch.randn(50, 64, generator=draw), torch.randn(50, generator=draw), Arithmetic(softcap=3.0))
    states = torch.randn(4, 64, generator=draw).to(dtype)
    found = logits(head, states)
    product = states.double() @ head.weight_VD.double().T + head.bias_V.double()
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, 3 * torch.tanh(product / 3), atol=1e-5)


def test_reading_leaves_its_inputs_as_they_were():
    case = Case(3, 4, 3, 20, ARITHMETICS[4])
    head, states = case.head, torch.tensor(case.states, dtype=torch.float32)
    final = torch.tensor(case.final, dtype=torch.float32)
    inputs = [head.weight_VD, head.bias_V, states, final]
    before = [values.clone() for values in inputs]
    read_rows(
        head, states, Request(ALL, 3, (1,), ((2, 3),)), torch.tensor(case.target), torch.tensor(case.answer), final
    )
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@given(
    hnp.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.integers(-2, 2)),
    st.data(),
)
@settings(max_examples=200)
def test_top_k_of_many_equal_logits_takes_the_lower_ids(rows, data):
    k = data.draw(st.integers(1, rows.shape[1]))
    values, ids = top_k(torch.tensor(rows, dtype=torch.float32), k)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    assert ids.dtype == torch.int32
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, order, axis=1))


@pytest.mark.parametrize("k", [1, 2, 7, 1000, 4999, 5000])
def test_top_k_breaks_ties_across_its_edge_in_a_large_vocabulary(k):
    rows = np.random.default_rng(4).integers(0, 40, (6, 5000))
    values, ids = top_k(torch.tensor(rows, dtype=torch.float32), k)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, order, axis=1))


@pytest.mark.parametrize("k", [1, 3, 64])
def test_top_k_of_one_value_everywhere_is_the_first_ids(k):
    assert top_k(torch.full((2, 64), -1.5), k)[1].tolist() == [list(range(k))] * 2


def test_top_k_passes_over_minus_infinity_until_nothing_else_is_left():
    rows = torch.tensor([[-math.inf, 2.0, -math.inf, 3.0, -math.inf]])
    values, ids = top_k(rows, 4)
    assert ids.tolist() == [[3, 1, 0, 2]]
    assert values.tolist() == [[3.0, 2.0, -math.inf, -math.inf]]


def test_top_k_holds_zero_and_minus_zero_equal():
    assert top_k(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 3)[1].tolist() == [[0, 1, 2]]


def test_rank_counts_strictly_larger_logits_only():
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 1.0]]).repeat(6, 1)
    logit, rank = logit_and_rank(rows, torch.arange(6))
    assert rank.tolist() == [4, 0, 0, 3, 0, 4]
    assert rank.dtype == torch.int32
    assert logit.tolist() == [1.0, 3.0, 3.0, 2.0, 3.0, 1.0]


def test_a_missing_target_or_answer_has_rank_minus_one_and_no_logit():
    case = Case(6, 3, 4, 12, ARITHMETICS[4])
    case.target[:], case.answer[:] = [-1, 5, -1], [7, -1, 0]
    found = case.read(2)
    assert (found["target_rank"] == -1).tolist() == [True, False, True]
    assert torch.isnan(found["target_logit"]).tolist() == [True, False, True]
    assert (found["answer_rank"] == -1).tolist() == [False, True, False]
    assert torch.isnan(found["answer_logit"]).tolist() == [False, True, False]


@pytest.mark.parametrize("broken", [[1], [0, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_broken_row_holds_no_number_and_its_neighbours_theirs(kind, broken):
    case = Case(8, 5, 4, 25, Arithmetic(divide=0.75))
    case.target[:], case.answer[:] = 3, 4
    # Finite states: the product with the token of large weights overflows to +inf, and to no NaN.
    case.weight[11] = np.abs(case.weight[11]) + 1
    case.weight[12:] *= -1
    whole = case.read(6)
    case.states[broken] = math.nan if kind == "nan" else 3e38
    found = case.read(6)
    rows = np.isin(np.arange(5), broken)
    for name, values in found.items():
        marks = torch.isnan(values) if values.is_floating_point() else values == -1
        assert marks[rows].all(), name
        torch.testing.assert_close(values[~rows], whole[name][~rows], rtol=0, atol=0, equal_nan=True)


def test_one_infinite_logit_among_finite_ones_breaks_its_row():
    head = Head(torch.tensor([[1e-3], [10.0], [-2e-3]]), torch.tensor([0.5, 0.25, 1.0]), Arithmetic())
    states = torch.tensor([[3e38], [2.0]])
    found = read_rows(head, states, Request(frozenset({"topk", "entropy", "target"}), 2), *[torch.tensor([2, 2])] * 2)
    assert logits(head, states)[0].isinf().tolist() == [False, True, False]
    assert found["topk_id"].tolist() == [[-1, -1], [1, 2]]
    assert found["target_rank"].tolist() == [-1, 1]
    assert torch.isnan(found["entropy"]).tolist() == [True, False]
    assert torch.isnan(found["topk_logit"]).tolist() == [[True, True], [False, False]]


@given(st.integers(0, 2**32 - 1), st.integers(2, 30))
@settings(max_examples=50)
def test_tokens_at_minus_infinity_add_nothing(seed, n_vocab):
    case = Case(seed, 3, 4, n_vocab, Arithmetic(multiply=1.5))
    shut = np.random.default_rng(seed).random(n_vocab) < 0.5
    shut[seed % n_vocab] = False
    case.bias = np.where(shut, -math.inf, case.bias)
    found = case.read(1)
    for r in range(3):
        z = [v for v in case.plain_logits(case.states[r]) if v > -math.inf]
        lse, q = plain_logprobs(z)
        p = plain_logprobs([v for v in case.plain_logits(case.final[r]) if v > -math.inf])[1]
        kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        middle = [(math.exp(a) + math.exp(b)) / 2 for a, b in zip(p, q, strict=True)]
        js = sum(math.exp(x) * (x - math.log(m)) / 2 for y in (p, q) for x, m in zip(y, middle, strict=True))
        assert found["js_final"][r].item() == pytest.approx(js, abs=1e-5)
        assert found["kl_reverse"][r].item() == pytest.approx(
            sum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True)), abs=2e-5
        )
        assert found["logsumexp"][r].item() == pytest.approx(lse, abs=1e-5)
        assert found["entropy"][r].item() == pytest.approx(-sum(math.exp(v) * v for v in q), abs=1e-5)
        assert found["kl_final"][r].item() == pytest.approx(kl, abs=2e-5)


def test_a_target_at_minus_infinity_ranks_behind_all_others():
    case = Case(9, 1, 3, 6, Arithmetic())
    case.bias[[2, 4]] = -math.inf
    case.target[:] = 2
    found = case.read(1)
    assert found["target_rank"].tolist() == [4]
    assert found["target_logit"].tolist() == [-math.inf]


def test_divergence_is_infinite_where_only_the_layer_rules_a_token_out():
    p = log_softmax(torch.tensor([[1.0, 2.0, 0.5], [1.0, -math.inf, 0.5]]))
    q = log_softmax(torch.tensor([[1.0, -math.inf, 0.5], [1.0, 2.0, 0.5]]))
    expected = plain_logprobs([1.0, 0.5])[1], plain_logprobs([1.0, 2.0, 0.5])[1]
    second = math.exp(expected[0][0]) * (expected[0][0] - expected[1][0])
    second += math.exp(expected[0][1]) * (expected[0][1] - expected[1][2])
    np.testing.assert_allclose(divergence(p, q), [math.inf, second], rtol=1e-6)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 30.0, 1000.0]))
@settings(max_examples=50)
def test_divergence_of_the_last_layer_from_itself_is_exactly_zero(seed, spread):
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(4, 8, generator=draw) * spread
    head = Head(torch.randn(300, 8, generator=draw), torch.randn(300, generator=draw), ARITHMETICS[seed % 6])
    measures = frozenset({"kl_final", "kl_reverse", "js_final"})
    found = read_rows(head, states, Request(measures, 1), nobody(4), nobody(4), states)
    for name in measures:
        assert found[name].tolist() == [0.0] * 4


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_divergence_of_nearly_equal_layers_is_never_negative(seed):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(8, 2000, generator=draw) * 5
    head, states, final = exact(rows.numpy(), (rows * (1 + 1e-6 * torch.randn(8, 1, generator=draw))).numpy())
    found = read_rows(head, states, Request(frozenset({"kl_final"}), 1), nobody(8), nobody(8), final)
    assert (found["kl_final"] >= 0).all()


def test_kl_final_without_the_last_layer_is_refused():
    head, states = exact([[1.0, 2.0]])
    with pytest.raises(ValueError, match="kl_final needs the last layer"):
        readout.read_rows(head, states[None], Request(frozenset({"kl_final"}), 1), {})


@pytest.mark.parametrize("height", [1, 3, 17])
def test_rows_read_in_blocks_of_any_height_are_the_same(height):
    case = Case(10, 17, 12, 301, ARITHMETICS[4])
    whole = case.read(9)
    parts = [case.read(9, rows=slice(start, start + height)) for start in range(0, 17, height)]
    for name, values in whole.items():
        found = torch.cat([part[name] for part in parts])
        if values.is_floating_point():
            torch.testing.assert_close(found, values, rtol=1e-6, atol=2e-6, equal_nan=True)
        else:
            assert torch.equal(found, values)


def precise(rows, final):
    z, f = rows.astype(np.float64), final.astype(np.float64)
    shifted = z - z.max(axis=1, keepdims=True)
    lse = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    q = shifted - lse
    p = f - f.max(axis=1, keepdims=True)
    p -= np.log(np.exp(p).sum(axis=1, keepdims=True))
    return (z.max(axis=1) + lse[:, 0]), -(np.exp(q) * q).sum(axis=1), (np.exp(p) * (p - q)).sum(axis=1)


@pytest.mark.parametrize("low, high", [(-190, 190), (-5, 5), (180, 190), (-190, -180)])
def test_a_vocabulary_of_fifty_thousand_keeps_the_precision_of_its_logsumexp(low, high):
    draw = np.random.default_rng(11)
    rows = draw.uniform(low, high, (4, 50_000)).astype(np.float32)
    last = (rows + draw.normal(0, 0.75, rows.shape)).astype(np.float32)
    head, states, final = exact(rows, last)
    measures = frozenset({"logsumexp", "entropy", "kl_final"})
    found = read_rows(head, states, Request(measures, 1), nobody(4), nobody(4), final)
    lse, entropy, kl = precise(rows, last)
    unit = np.spacing(np.abs(lse).astype(np.float32))  # of the last place; its half is the error of one rounding
    assert (np.abs(found["logsumexp"].numpy() - lse) <= 2 * unit).all()
    assert (np.abs(found["entropy"].numpy() - entropy) <= unit * (1 + entropy)).all()
    assert (np.abs(found["kl_final"].numpy() - kl) <= 2 * unit * (1 + kl)).all()


def test_a_largest_logit_that_comes_late_and_towers_over_the_others_leaves_divergences_whole():
    rows = np.full((2, 700), -2000.0)
    rows[:, 600] = 100.0
    rows[1, 300] = 99.0
    last = np.full((2, 700), -2000.0)
    last[:, 5], last[:, 600] = 3.0, 2.0
    head, states, final = exact(rows, last)
    measures = frozenset({"kl_final", "kl_reverse", "js_final", "entropy", "varentropy"})
    found = read_rows(head, states, Request(measures, 1), nobody(2), nobody(2), final)
    _, entropy, kl = precise(rows, last)
    np.testing.assert_allclose(found["kl_final"], kl, rtol=1e-6)
    np.testing.assert_allclose(found["entropy"], entropy, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["kl_reverse"], precise(last, rows)[2], rtol=1e-6)


def test_entropy_of_equal_logits_is_the_log_of_their_number():
    found = measure(np.full((2, 50_000), 3.0), "entropy", "logsumexp")
    np.testing.assert_allclose(found["entropy"], [math.log(50_000)] * 2, rtol=1e-6)
    np.testing.assert_allclose(found["logsumexp"], [3 + math.log(50_000)] * 2, rtol=1e-6)


def test_entropy_of_a_certain_prediction_is_zero():
    rows = np.full((1, 1000), -1000.0)
    rows[0, 3] = 1000.0
    assert measure(rows, "entropy")["entropy"].item() == 0.0


@pytest.mark.parametrize("n_rows", [1, 2, 7])
def test_a_budget_of_so_many_rows_allows_so_many(n_rows):
    head = Head(torch.zeros(1001, 12), None, Arithmetic())
    row = 4 * 3 * 5 * 12  # what fused.row_bytes says
    assert rows_per_block(n_rows * row, head, 5) == n_rows
    assert rows_per_block(n_rows * row + row - 1, head, 5) == n_rows


def test_a_budget_below_one_row_is_refused():
    head = Head(torch.zeros(1001, 12), None, Arithmetic())
    row = 4 * 3 * 5 * 12
    with pytest.raises(RequestError, match=rf"run\.memory is {row - 1} bytes, but one row takes {row}"):
        rows_per_block(row - 1, head, 5)


@given(st.integers(1, 10**12), st.integers(1, 300_000), st.integers(1, 100))
def test_a_block_never_exceeds_its_budget(budget, n_vocab, n_states):
    head = Head(torch.zeros(1, 8).expand(n_vocab, 8), None, Arithmetic())
    for way in (fused, plain):
        row, most = way.row_bytes(head, n_states)
        assert row >= 4 * n_states * 8
        assert most >= 1
    row, _ = fused.row_bytes(head, n_states)
    if budget >= row:
        assert 1 <= rows_per_block(budget, head, n_states) <= budget // row
