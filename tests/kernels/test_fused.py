"""Fused: tiles, lanes, threads and low precision change nothing; a rank is that of the product that ranked it."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from lenspipe.kernels import fused, plain, product, readout, tile, walk
from lenspipe.kernels.fused import LANES
from lenspipe.kernels.head import TILE, Arithmetic, Head, Request
from lenspipe.kernels.product import Product, choose_product

MEASURES = frozenset({
    "topk", "logsumexp", "entropy", "target", "kl_final", "tracked", "answer", "varentropy", "renyi2", "margin",
    "kl_reverse", "js_final", "final_top1", "token_sets",
})  # fmt: skip
V, D = 3 * TILE + 17, 24
WAYS = [
    way
    for way in ("torch float32", "oneDNN float32", "oneDNN bfloat16")
    if way == "torch float32" or product._is_right(way)
]


def operands(n_places, n_rows, seed=0, dtype=torch.float32, arithmetic=None):
    draw = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(V, D, generator=draw).to(dtype), torch.randn(V, generator=draw)
    states = torch.randn(n_places, n_rows, D, generator=draw).to(dtype)
    asked = {name: torch.randint(-1, V, (n_rows,), generator=draw) for name in ("target", "answer")}
    return Head(weight, bias, arithmetic or Arithmetic(multiply=0.7, softcap=9.0)), states, asked


def request(k=7):
    return Request(MEASURES, k, (2, V - 1, TILE), ((5, 0, V - 1), tuple(range(1, V, 2))))


def use(monkeypatch, way):
    monkeypatch.setattr(fused, "choose_product", lambda *_: Product(way))


def in_float64(head, state_D):
    z = head.weight_VD.double().numpy() @ state_D.double().numpy() + head.bias_V.double().numpy()
    steps = head.arithmetic
    z = z * (steps.multiply or 1) / (steps.divide or 1)
    return steps.softcap * np.tanh(z / steps.softcap) if steps.softcap else z


@pytest.mark.parametrize("n_places, n_rows", [(1, 1), (3, 1), (31, 5), (2, 63), (2, 64), (3, LANES), (1, LANES + 1)])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_multiply_gives_the_numbers_of_float64(monkeypatch, way, n_places, n_rows):
    use(monkeypatch, way)
    head, states, asked = operands(n_places, n_rows, dtype=torch.bfloat16 if "bf" in way else torch.float32)
    found = fused.read_rows(head, states, request(), asked, n_places - 1)
    for p in range(n_places):
        for r in range(0, n_rows, 13):
            z, final = in_float64(head, states[p, r]), in_float64(head, states[-1, r])
            lse, final_lse = (x.max() + math.log(np.exp(x - x.max()).sum()) for x in (z, final))
            q, w = np.exp(z - lse), np.exp(final - final_lse)
            assert found["topk_id"][p, r].tolist() == np.argsort(-z, kind="stable")[:7].tolist()
            target = int(asked["target"][r])
            assert found["target_rank"][p, r] == (-1 if target < 0 else (z > z[target]).sum())
            assert found["tracked_rank"][p, r].tolist() == [(z > z[token]).sum() for token in request().tracked]
            expected = {
                "logsumexp": lse,
                "entropy": -(q * (z - lse)).sum(),
                "kl_final": (w * ((final - final_lse) - (z - lse))).sum(),
                "topk_logit": np.sort(z)[::-1][:7],
                "varentropy": (q * (z - lse) ** 2).sum() - (q * (z - lse)).sum() ** 2,
                "renyi2": -np.log((q * q).sum()),
                "margin": np.sort(z)[-1] - np.sort(z)[-2],
                "kl_reverse": (q * ((z - lse) - (final - final_lse))).sum(),
                "js_final": (w * np.log(2 * w / (w + q)) + q * np.log(2 * q / (w + q))).sum() / 2,
                "set_mass": [q[list(tokens)].sum() for tokens in request().sets],
                "final_top1_rank": (z > z[final.argmax()]).sum(),
                "final_top1_logit": z[final.argmax()],
            }
            for name, value in expected.items():
                np.testing.assert_allclose(found[name][p, r], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n_places, n_rows", [(1, 3), (7, 5), (1, 64), (4, 2 * LANES + 9)])
def test_the_number_of_threads_changes_no_bit(n_threads, n_places, n_rows):
    head, states, asked = operands(n_places, n_rows, seed=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = fused.read_rows(head, states, request(), asked, n_places - 1)
        torch.set_num_threads(n_threads)
        together = fused.read_rows(head, states, request(), asked, n_places - 1)
        assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)
    for name, values in alone.items():
        torch.testing.assert_close(together[name], values, rtol=0, atol=0, equal_nan=True)


def test_reading_leaves_the_number_of_threads_of_new_threads_alone():
    script = (
        "import torch, threading; from lenspipe.kernels import fused; from lenspipe.kernels.head import *\n"
        "torch.set_num_threads(2)\n"
        "head = Head(torch.randn(300, 8), None, Arithmetic())\n"
        "fused.read_rows(head, torch.randn(4, 9, 8), Request(frozenset({'entropy'}), 1), {}, None)\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))\n"
        "thread.start(); thread.join()\n"
        "print(seen, torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[2] 2"


@pytest.mark.parametrize("places", [slice(0, 1), slice(2, 5)])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 140)])
def test_a_row_is_the_same_whatever_is_read_beside_it(places, rows):
    head, states, asked = operands(6, 150, seed=2)
    measures = replace(request(), measures=frozenset({"topk", "entropy", "target", "answer", "margin", "renyi2"}))
    whole = fused.read_rows(head, states, measures, asked, None)
    some = {name: ids[rows] for name, ids in asked.items()}
    part = fused.read_rows(head, states[places, rows], measures, some, None)
    for name, values in part.items():
        torch.testing.assert_close(values, whole[name][places, rows], rtol=0, atol=0, equal_nan=True)


def test_a_rank_is_counted_against_the_logit_of_its_own_tile(monkeypatch):
    """The product of a token alone may round otherwise than its tile's: here it is made to."""
    head, states, asked = operands(3, 40, seed=3)
    right = fused.read_rows(head, states, request(), asked, 2)
    honest = walk.Walk._asked

    def off(self, operand, id_QL):
        logits_QL = honest(self, operand, id_QL)
        return np.nextafter(logits_QL, np.float32(-np.inf)) - np.float32(0.05)

    monkeypatch.setattr(walk.Walk, "_asked", off)
    found = fused.read_rows(head, states, request(), asked, 2)
    for name, values in right.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0, equal_nan=True)


def test_a_token_does_not_count_itself_among_larger_ones_in_real_products():
    draw = torch.Generator().manual_seed(4)
    head = Head(torch.randn(5000, 192, generator=draw), None, Arithmetic())
    states = torch.randn(1, 300, 192, generator=draw)
    everything = Request(frozenset({"topk", "target"}), 1)
    best = fused.read_rows(head, states, everything, {}, None)["topk_id"][0, :, 0].long()
    assert (fused.read_rows(head, states, everything, {"target": best}, None)["target_rank"] == 0).all()


def test_equal_logits_on_both_sides_of_a_tile_take_the_lower_id():
    rows = np.zeros((2, 2 * TILE + 5), np.float32)
    rows[0, [TILE - 1, TILE, 2 * TILE + 1]] = 1.0
    rows[1, [3, TILE + 3, 2 * TILE + 3]] = 2.0
    head = Head(torch.from_numpy(rows.T.copy()), None, Arithmetic())
    found = fused.read_rows(head, torch.eye(2)[None], Request(frozenset({"topk"}), 4), {}, None)
    assert found["topk_id"][0].tolist() == [[TILE - 1, TILE, 2 * TILE + 1, 0], [3, TILE + 3, 2 * TILE + 3, 0]]


def test_top_k_may_be_wider_than_a_tile():
    head, states, _ = operands(1, 3, seed=5)
    found = fused.read_rows(head, states, Request(frozenset({"topk"}), V), {}, None)["topk_id"]
    expected = plain.read_rows(head, states, Request(frozenset({"topk"}), V), {}, None)["topk_id"]
    assert (found.sort().values == torch.arange(V)).all()
    assert (found == expected).float().mean() > 0.99  # tanh of two libraries may swap neighbours


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.01, 3.0, 60.0])
def test_a_vocabulary_of_256_000_keeps_entropy_and_divergence_within_1e_5_of_float64(spread):
    draw = torch.Generator().manual_seed(6)
    rows = torch.randn(256_000, 4, generator=draw) * spread
    weight = torch.cat([rows, rows + 0.3 * torch.randn(256_000, 4, generator=draw)], dim=1)
    head, states = Head(weight, None, Arithmetic()), torch.eye(8).reshape(2, 4, 8)
    measures = frozenset({"entropy", "kl_final", "kl_reverse", "js_final", "varentropy"})
    found = fused.read_rows(head, states, Request(measures, 1), {}, 1)
    z, final = (weight.T[i : i + 4].double().log_softmax(1) for i in (0, 4))
    np.testing.assert_allclose(found["entropy"][0], -(z.exp() * z).sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["kl_final"][0], (final.exp() * (final - z)).sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["kl_reverse"][0], (z.exp() * (z - final)).sum(1), rtol=1e-5, atol=1e-5)
    middle = torch.logaddexp(z, final) - math.log(2)
    js = ((z.exp() * (z - middle)).sum(1) + (final.exp() * (final - middle)).sum(1)) / 2
    np.testing.assert_allclose(found["js_final"][0], js, rtol=1e-5, atol=1e-6)
    mean = (z.exp() * z).sum(1, keepdim=True)
    np.testing.assert_allclose(found["varentropy"][0], (z.exp() * (z - mean) ** 2).sum(1), rtol=1e-5, atol=1e-5)


def test_the_exponential_is_that_of_float64_to_two_units_of_the_last_place():
    x = np.linspace(-86.9, 0, 200_001, dtype=np.float32)[:, None]
    found = np.empty_like(x)
    tile.probabilities(x, np.zeros((2, 1), np.float32), found)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(found - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_the_hyperbolic_tangent_is_that_of_float64_to_four_units_of_the_last_place():
    draw = np.random.default_rng(7)
    x = np.concatenate([draw.normal(0, s, 50_000) for s in (1e-6, 1e-2, 0.6, 2, 30)]).astype(np.float32)[:, None]
    found = x.copy()
    tile.arithmetic(found, np.empty(0, np.float32), math.nan, math.nan, 1.0)
    exact = np.tanh(x.astype(np.float64))
    assert (np.abs(found - exact) <= 4 * np.spacing(np.abs(exact).astype(np.float32))).all()


def test_bfloat16_operands_that_cannot_be_paired_are_read_in_float32():
    assert choose_product(torch.bfloat16, torch.bfloat16, 7).way != "oneDNN bfloat16"
    assert choose_product(torch.bfloat16, torch.float32, 8).way != "oneDNN bfloat16"
    assert choose_product(torch.float16, torch.float16, 8).way != "oneDNN bfloat16"


def test_without_mkldnn_torch_multiplies():
    torch._C._set_mkldnn_enabled(False)
    try:
        assert choose_product(torch.bfloat16, torch.bfloat16, 8).way == "torch float32"
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_dtype_are_read(dtype):
    head, states, asked = operands(2, 9, seed=8, dtype=dtype)
    found = fused.read_rows(head, states.float(), request(), asked, 1)
    plainly = plain.read_rows(replace(head, weight_VD=head.weight_VD.float()), states.float(), request(), asked, 1)
    for name, values in plainly.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_without_numba_the_plain_readout_serves(monkeypatch):
    monkeypatch.delattr("lenspipe.kernels.fused")
    monkeypatch.setitem(sys.modules, "lenspipe.kernels.fused", None)
    readout._fused.cache_clear()
    try:
        assert readout.way_of(torch.device("cpu")) is plain
    finally:
        readout._fused.cache_clear()
