"""CUDA: tiles, rooms and second walks change nothing; run on a GPU where there is one, else in Triton's interpreter."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from lenspipe import variables
from lenspipe.kernels import cuda, cuda_walk, plain, readout
from lenspipe.kernels.head import Arithmetic, Head, Request

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MEASURES = frozenset({
    "topk", "logsumexp", "entropy", "target", "kl_final", "tracked", "answer", "varentropy", "renyi2", "margin",
    "kl_reverse", "js_final", "final_top1", "token_sets", "logprob",
})  # fmt: skip
TILE = 32
V, D = 2 * TILE + 9, 12
CLOSE = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
ARITHMETICS = [
    Arithmetic(),
    Arithmetic(multiply=0.375),
    Arithmetic(divide=3.0, softcap=0.75),
    Arithmetic(multiply=-1.75, divide=0.625, softcap=7.5),
]


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(cuda_walk, "TILE", TILE)


def operands(n_places, n_rows, seed=0, dtype=torch.float32, arithmetic=ARITHMETICS[3], with_bias=True):
    draw = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(V, D, generator=draw).to(DEVICE, dtype), torch.randn(V, generator=draw).to(DEVICE)
    states = torch.randn(n_places, n_rows, D, generator=draw).to(DEVICE, dtype)
    asked = {name: torch.randint(-1, V, (n_rows,), generator=draw).to(DEVICE) for name in ("target", "answer")}
    return Head(weight, bias if with_bias else None, arithmetic), states, asked


def exact(logits_RV):
    """A head and states whose logits are given, bit for bit."""
    rows = torch.as_tensor(logits_RV, dtype=torch.float32, device=DEVICE)
    return Head(rows.T.contiguous(), None, Arithmetic()), torch.eye(len(rows), device=DEVICE)[None]


def request(measures=MEASURES, k=5):
    return Request(frozenset(measures), k, (2, V - 1, TILE), ((5, 0, V - 1), tuple(range(1, V, 2))))


def same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        torch.testing.assert_close(found[name], values, msg=name, **({"equal_nan": True} | tolerance))


def in_float64(head, state_D):
    z = head.weight_VD.double().cpu().numpy() @ state_D.double().cpu().numpy()
    z = z if head.bias_V is None else z + head.bias_V.double().cpu().numpy()
    steps = head.arithmetic
    z = z * (steps.multiply or 1) / (steps.divide or 1)
    return steps.softcap * np.tanh(z / steps.softcap) if steps.softcap else z


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=str)
def test_every_measure_is_that_of_float64(arithmetic, with_bias):
    head, states, asked = operands(2, 2, 0, torch.float32, arithmetic, with_bias)
    found = {name: values.cpu() for name, values in cuda.read_rows(head, states, request(), asked, 1).items()}
    for p in range(2):
        for r in range(2):
            z, final = in_float64(head, states[p, r]), in_float64(head, states[1, r])
            lse, final_lse = (x.max() + math.log(np.exp(x - x.max()).sum()) for x in (z, final))
            q, w = np.exp(z - lse), np.exp(final - final_lse)
            assert found["topk_id"][p, r].tolist() == np.argsort(-z, kind="stable")[:5].tolist()
            assert found["tracked_rank"][p, r].tolist() == [(z > z[token]).sum() for token in request().tracked]
            expected = {
                "logsumexp": lse,
                "entropy": -(q * (z - lse)).sum(),
                "kl_final": (w * ((final - final_lse) - (z - lse))).sum(),
                "topk_logit": np.sort(z)[::-1][:5],
                "topk_logprob": np.sort(z)[::-1][:5] - lse,
                "varentropy": (q * (z - lse) ** 2).sum() - (q * (z - lse)).sum() ** 2,
                "renyi2": -np.log((q * q).sum()),
                "margin": np.sort(z)[-1] - np.sort(z)[-2],
                "kl_reverse": (q * ((z - lse) - (final - final_lse))).sum(),
                "js_final": (w * np.log(2 * w / (w + q)) + q * np.log(2 * q / (w + q))).sum() / 2,
                "set_mass": [q[list(tokens)].sum() for tokens in request().sets],
                "final_top1_rank": (z > z[final.argmax()]).sum(),
                "final_top1_logit": z[final.argmax()],
            }
            for name in ("target", "answer"):
                token = int(asked[name][r])
                expected[f"{name}_rank"] = -1 if token < 0 else (z > z[token]).sum()
                expected[f"{name}_logit"] = math.nan if token < 0 else z[token]
            for name, value in expected.items():
                np.testing.assert_allclose(found[name][p, r], value, **CLOSE, err_msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_operands_of_any_dtype_are_read_as_the_plain_way_does(dtype, state_dtype):
    head, states, asked = operands(1, 3, seed=1, dtype=dtype)
    states = states.to(state_dtype or dtype)
    measures = request({"topk", "entropy", "target", "kl_final"})
    plainly = plain.read_rows(replace(head, weight_VD=head.weight_VD.float()), states.float(), measures, asked, 0)
    same(cuda.read_rows(head, states, measures, asked, 0), plainly, rtol=1e-5, atol=1e-5)


def test_the_width_of_a_tile_changes_no_rank_and_no_id(monkeypatch):
    head, states, asked = operands(2, 2, seed=2)
    narrow = cuda.read_rows(head, states, request(), asked, 1)
    monkeypatch.setattr(cuda_walk, "TILE", 128)
    same(cuda.read_rows(head, states, request(), asked, 1), narrow, rtol=1e-5, atol=2e-6)


def test_a_row_is_the_same_whatever_is_read_beside_it():
    head, states, asked = operands(2, 5, seed=3)
    whole = cuda.read_rows(head, states, request(), asked, 1)
    part = {name: ids[1:3] for name, ids in asked.items()}
    few = cuda.read_rows(head, states[:, 1:3], request(), part, 1)
    same(few, {name: values[:, 1:3] for name, values in whole.items()}, rtol=1e-5, atol=2e-6)


def test_a_measure_alone_is_the_same_as_among_all():
    head, states, asked = operands(2, 2, seed=4)
    together = cuda.read_rows(head, states, request(), asked, 1)
    for name in MEASURES - {"logprob"}:
        some = {key: ids for key, ids in asked.items() if key == name}
        alone = cuda.read_rows(head, states, request({name}), some, 1)
        same(alone, {variable: together[variable] for variable in alone}, rtol=0, atol=0)


@pytest.mark.parametrize(
    "below, above, room, walks",
    [(0.0, 0.0, 32, 1), (-0.5, 0.5, 64, 1), (0.25, 0.25, 32, 2), (-0.25, -0.25, 32, 2), (-9, 9, 2, 2)],
)
def test_a_rank_is_counted_against_the_logit_of_its_own_tile(monkeypatch, below, above, room, walks):
    """Whether it lies where it was expected or not, and whether all logits near it have been kept or not."""
    head, states, asked = operands(2, 3, seed=5)
    between, over, walked = cuda_walk.Walk._between, cuda_walk.Walk._over, []

    def moved(walk, id_QR):
        low_QS, high_QS = between(walk, id_QR)
        return low_QS + below, high_QS + above

    monkeypatch.setattr(cuda_walk.Walk, "_between", moved)
    monkeypatch.setattr(cuda_walk.Walk, "_over", lambda *a, **b: walked.append(1) or over(*a, **b))
    monkeypatch.setattr(cuda_walk, "NEAR_ROOM", room)
    found = cuda.read_rows(head, states, request({"target", "answer", "tracked"}), asked, None)
    assert len(walked) == walks
    for p in range(2):
        for r in range(3):
            z = in_float64(head, states[p, r])
            for name in ("target", "answer"):
                token = int(asked[name][r])
                assert found[f"{name}_rank"][p, r] == (-1 if token < 0 else (z > z[token]).sum())
            assert found["tracked_rank"][p, r].tolist() == [(z > z[token]).sum() for token in request().tracked]


def test_a_token_does_not_count_itself_among_larger_ones_in_real_products():
    draw = torch.Generator().manual_seed(7)
    head = Head(torch.randn(300, 192, generator=draw).to(DEVICE), None, Arithmetic())
    states = torch.randn(1, 5, 192, generator=draw).to(DEVICE)
    best = cuda.read_rows(head, states, request({"topk"}, 1), {}, None)["topk_id"][0, :, 0]
    assert (cuda.read_rows(head, states, request({"target"}), {"target": best}, None)["target_rank"] == 0).all()


def test_equal_logits_on_both_sides_of_a_tile_take_the_lower_id_and_one_rank():
    rows = np.zeros((2, V), np.float32)
    rows[0, [TILE - 1, TILE, 2 * TILE + 1]] = 1.0
    rows[1, [3, TILE + 3, 2 * TILE + 3]] = 2.0, 2.0, -0.0
    head, states = exact(rows)
    asked = {"target": torch.tensor([TILE, 2 * TILE + 3], device=DEVICE)}
    found = cuda.read_rows(head, states, request({"topk", "target"}, 4), asked, None)
    assert found["topk_id"][0].tolist() == [[TILE - 1, TILE, 2 * TILE + 1, 0], [3, TILE + 3, 0, 1]]
    assert found["target_rank"][0].tolist() == [0, 2]


@pytest.mark.parametrize("k", [1, 3, TILE, TILE + 3, V])
def test_top_k_holds_where_every_tile_brings_more_than_there_is_room_for(monkeypatch, k):
    monkeypatch.setattr(cuda_walk, "TOP_ROOM", 1)
    rows = np.random.default_rng(8).integers(0, 40, (2, V)) + np.arange(V) // TILE * 50
    head, states = exact(rows)
    found = cuda.read_rows(head, states, request({"topk"}, k), {}, None)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(found["topk_id"][0].cpu(), order)
    np.testing.assert_array_equal(found["topk_logit"][0].cpu(), np.take_along_axis(rows, order, axis=1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("token", [1, 2 * TILE + 1])
def test_a_broken_row_holds_no_number_and_its_neighbours_theirs(value, token):
    # A weight overflows with one state alone, and meets zeros otherwise.
    head, states, asked = operands(2, 3, seed=9, arithmetic=Arithmetic(multiply=0.5))
    head.weight_VD[:, 0] = 0
    whole = cuda.read_rows(head, states, request(), asked, 1)
    head.weight_VD[token, 0] = 1e20
    states[:, :, 0] = 0
    states[0, 1, 0] = math.nan if math.isnan(value) else 3e38
    found = cuda.read_rows(head, states, request(), asked, 1)
    rows = torch.tensor([[False, True, False], [False, False, False]], device=DEVICE)
    for name, values in found.items():
        marks = torch.isnan(values) if values.is_floating_point() else values == -1
        assert marks[rows].all(), name
        torch.testing.assert_close(values[~rows], whole[name][~rows], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("one_token", [False, True])
def test_a_broken_last_layer_leaves_no_divergence_and_no_first_choice(one_token):
    head, states, asked = operands(2, 2, seed=10)
    head.weight_VD[:, 0], states[:, :, 0] = 0, 0
    head.weight_VD[3, 0], head.bias_V[3] = -1e20, -math.inf  # +inf - inf where it overflows, -inf elsewhere
    states[1, 0, 0] = -3e38 if one_token else math.nan
    found = cuda.read_rows(head, states, request(), asked, 1)
    for name in ("kl_final", "kl_reverse", "js_final", "final_top1_logit"):
        assert torch.isnan(found[name]).tolist() == [[True, False], [True, False]]
    assert (found["final_top1_rank"] == -1).tolist() == [[True, False], [True, False]]
    assert torch.isfinite(found["entropy"]).tolist() == [[True, True], [False, True]]


def test_tokens_at_minus_infinity_add_nothing_and_rank_behind_all_others():
    head, states, _ = operands(2, 2, seed=11, arithmetic=Arithmetic(multiply=1.5))
    shut = torch.arange(V, device=DEVICE) % 3 != 1
    shut[:TILE] = True  # a whole tile of them
    asked = {"target": torch.tensor([0, V - 1], device=DEVICE)}
    small = replace(head, weight_VD=head.weight_VD[~shut], bias_V=head.bias_V[~shut])
    head.bias_V[shut] = -math.inf
    measures = {"logsumexp", "entropy", "kl_final", "kl_reverse", "js_final", "varentropy", "renyi2", "margin"}
    found = cuda.read_rows(head, states, request(measures | {"target"}), asked, 1)
    same({name: found[name] for name in measures}, plain.read_rows(small, states, request(measures), {}, 1), **CLOSE)
    assert found["target_rank"][:, 0].tolist() == [int((~shut).sum())] * 2
    assert found["target_logit"][:, 0].tolist() == [-math.inf] * 2


@pytest.mark.parametrize("later, kl", [(0.25, math.inf), (1000.0, 0.0)])
def test_divergence_is_infinite_where_the_layer_rules_out_what_the_last_one_does_not(later, kl):
    rows = np.zeros((2, 2 * TILE), np.float32)
    rows[0, 1], rows[:, TILE + 2] = -3e38, later  # the last layer holds token 1 for possible, or as good as not
    head, states = exact(rows)
    head = replace(head, arithmetic=Arithmetic(multiply=4.0))
    found = cuda.read_rows(head, states[0][:, None], request({"kl_final", "kl_reverse"}), {}, 1)
    assert found["kl_final"][:, 0].tolist() == [kl, 0.0]
    assert math.isfinite(found["kl_reverse"][0, 0])


@pytest.mark.parametrize("arithmetic", [ARITHMETICS[0], ARITHMETICS[3]], ids=str)
@pytest.mark.parametrize("spread", [1.0, 1000.0])
def test_divergence_of_the_last_layer_from_itself_is_exactly_zero(arithmetic, spread):
    head, states, _ = operands(2, 2, seed=12, arithmetic=arithmetic)
    measures = {"kl_final", "kl_reverse", "js_final"}
    found = cuda.read_rows(head, states * spread, request(measures), {}, 0)
    for name in measures:
        assert found[name][0].tolist() == [0.0, 0.0]
        assert (found[name][1] >= 0).all()


@pytest.mark.parametrize("spread", [0.01, 3.0, 60.0])
def test_a_vocabulary_of_fifty_thousand_keeps_its_sums_within_1e_5_of_float64(monkeypatch, spread):
    monkeypatch.undo()
    draw = torch.Generator().manual_seed(13)
    rows = torch.randn(2, 50_000, generator=draw) * spread
    head, states = exact(torch.cat([rows, rows + 0.3 * torch.randn(2, 50_000, generator=draw)]))
    measures = {"entropy", "kl_final", "kl_reverse", "js_final", "varentropy", "logsumexp"}
    found = cuda.read_rows(head, states.reshape(2, 2, 4), request(measures), {}, 1)
    z, final = (head.weight_VD.T[i : i + 2].double().log_softmax(1) for i in (0, 2))
    middle, mean = torch.logaddexp(z, final) - math.log(2), (z.exp() * z).sum(1, keepdim=True)
    expected = {
        "entropy": -mean[:, 0],
        "kl_final": (final.exp() * (final - z)).sum(1),
        "kl_reverse": (z.exp() * (z - final)).sum(1),
        "js_final": ((z.exp() * (z - middle)).sum(1) + (final.exp() * (final - middle)).sum(1)) / 2,
        "varentropy": (z.exp() * (z - mean) ** 2).sum(1),
        "logsumexp": head.weight_VD.T[:2].double().logsumexp(1),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name][0].cpu(), values.cpu(), rtol=1e-5, atol=1e-5, err_msg=name)


def test_every_measure_of_today_is_known_here():
    assert MEASURES | frozenset(variables.MEASURES) <= cuda.KNOWN


def test_a_measure_that_is_not_known_here_is_read_the_plain_way(monkeypatch):
    monkeypatch.setattr(cuda, "KNOWN", cuda.KNOWN - {"renyi2"})
    monkeypatch.setattr(plain, "row_bytes", lambda *_: (1, 2))
    head, states, asked = operands(2, 5, seed=14)
    plainly = plain.read_rows(head, states, request(), asked, 1)
    same(cuda.read_rows(head, states, request(), asked, 1), plainly, rtol=1e-5, atol=1e-5)


def test_a_gpu_is_read_by_this_module_and_without_triton_the_plain_way(monkeypatch):
    assert readout.way_of(torch.device("cuda:1")) is cuda
    monkeypatch.delattr("lenspipe.kernels.cuda")
    monkeypatch.setitem(sys.modules, "lenspipe.kernels.cuda", None)
    readout._cuda.cache_clear()
    try:
        assert readout.way_of(torch.device("cuda")) is plain
    finally:
        readout._cuda.cache_clear()


def test_tf32_is_named():
    head, _, _ = operands(1, 1)
    assert cuda.way(head, torch.float32) == "cuBLAS float32"
    torch.set_float32_matmul_precision("high")
    try:
        assert cuda.way(head, torch.float32) == "cuBLAS TF32"
    finally:
        torch.set_float32_matmul_precision("highest")


COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lenspipe.kernels import cuda_tile, cuda_walk

def check(kernel, types, warps, **constants):
    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, **cuda_walk.AS_WRITTEN}
    compile(ASTSource(kernel, signature, at), target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)

f, i = "*fp32", "*i32"
block = cuda_walk.TILE
types = {
    "z_ptr": f, "largest_ptr": f, "nans_ptr": i, "final_largest_ptr": f, "sum_ptr": "*fp64", "id_ptr": "*i64",
    "low_ptr": f, "high_ptr": f, "seen_ptr": f, "count_ptr": i, "near_ptr": f, "n_near_ptr": i, "least_ptr": f,
    "entrant_ptr": f, "entrant_id_ptr": i, "n_entrants_ptr": i, "bias_ptr": f, "norm_ptr": f,
    "multiply": "fp32", "divide": "fp32", "softcap": "fp32",
}
for on in (True, False):
    flags = dict.fromkeys([*cuda_walk.SUMS, "TOP"], on)
    check(cuda_tile.absorb, types, cuda_walk.WARPS, **flags, NEAR_ROOM=32, TOP_ROOM=128, BLOCK=block)
check(cuda_tile.shannon, types, cuda_walk.WARPS, BLOCK=block)
check(cuda_tile.arithmetic, types, 4, BLOCK=1024)
check(cuda_tile.arithmetic, types, 4, BLOCK=1024, bias_ptr=None, multiply=None, divide=None)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_a_gpu_that_is_not_there(capability, tmp_path):
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(capability)]
    done = subprocess.run(command, check=False, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
