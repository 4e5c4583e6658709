"""Marginal: the sum of probabilities is that of float64, whatever the dtype; broken and uncounted rows add nothing."""

import numpy as np
import pytest
import torch

from lenspipe.kernels import marginal
from lenspipe.kernels.head import Arithmetic, Head, logits

V, D = 2 * marginal.STRIDE + 33, 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arithmetic", [Arithmetic(), Arithmetic(multiply=0.5, softcap=6.0), Arithmetic(divide=3.0)])
def test_probabilities_are_added_up(dtype, arithmetic):
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(V, D, generator=draw).to(dtype), 3 * torch.randn(V, generator=draw)
    states = torch.randn(3, 40, D, generator=draw).to(dtype)
    counted = torch.rand(40, generator=draw) < 0.6
    counted[7] = True
    head = Head(weight, bias, arithmetic)
    broken = states.clone()
    broken[1, 7] = torch.nan
    lse = torch.stack([logits(head, state).logsumexp(1) for state in broken])
    found, counts = marginal.add_up(head, broken, lse, counted)
    z = states.double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    z = z * (arithmetic.multiply or 1) / (arithmetic.divide or 1)
    z = arithmetic.softcap * np.tanh(z / arithmetic.softcap) if arithmetic.softcap else z
    p = np.exp(z - np.logaddexp.reduce(z, axis=2, keepdims=True))
    p[1, 7] = 0
    np.testing.assert_allclose(found, p[:, counted.numpy()].sum(axis=1), rtol=1e-5)
    assert counts.tolist() == [int(counted.sum()), int(counted.sum()) - 1, int(counted.sum())]


def test_no_row_adds_nothing():
    head = Head(torch.randn(50, 3), None, Arithmetic())
    found, counts = marginal.add_up(head, torch.randn(2, 4, 3), torch.zeros(2, 4), torch.zeros(4, dtype=torch.bool))
    assert (found == 0).all()
    assert counts.tolist() == [0, 0]
