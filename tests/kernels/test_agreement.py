"""Fused and plain: two implementations of one interface, on random operands of every kind, give the same numbers."""

import math
import random

import pytest
import torch

from lenspipe.kernels import fused, plain
from lenspipe.kernels.head import Arithmetic, Head, Request, logits
from lenspipe.variables import MEASURES

OF_THE_KERNEL = [name for name in MEASURES if not name.startswith(("residual", "cosine", "marginal"))]
BESIDE = ["tracked", "token_sets", "answer", "logprob"]
ASKED = {"target", "target_0", "target_2", "target_3", "answer"}


def near(z):
    return 1e-4 * (1 + z.abs())


@pytest.mark.parametrize("seed", range(80))
def test_fused_and_plain_agree(seed):
    choose = random.Random(seed)
    draw = torch.Generator().manual_seed(seed)
    n_places, n_rows = choose.choice([1, 2, 3, 7, 31]), choose.choice([1, 2, 5, 16, 17, 63, 65, 130, 300])
    n_vocab, width = choose.choice([2, 3, 31, 33, 255, 256, 257, 4095, 4097, 9000]), choose.choice([1, 3, 8, 31, 64])
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    weight = (torch.randn(n_vocab, width, generator=draw) * choose.choice([0.01, 1, 30])).to(dtype)
    states = torch.randn(n_places, n_rows, width, generator=draw).to(dtype)
    bias = torch.randn(n_vocab, generator=draw) if choose.random() < 0.5 else None
    if bias is not None and choose.random() < 0.3:
        bias[torch.rand(n_vocab, generator=draw) < 0.2] = -math.inf
    if choose.random() < 0.3:
        states[choose.randrange(n_places), choose.randrange(n_rows)] = choose.choice([math.nan, math.inf])
    steps = [Arithmetic(), Arithmetic(softcap=7.0), Arithmetic(multiply=-2.5), Arithmetic(divide=3.0, softcap=20.0)]
    head = Head(weight, bias, choose.choice(steps))
    measures = frozenset(choose.sample(OF_THE_KERNEL + BESIDE, choose.randint(1, len(OF_THE_KERNEL))))
    tracked = (choose.randrange(n_vocab), choose.randrange(n_vocab))
    top_k = min(choose.choice([1, 2, 10, n_vocab]), n_vocab)
    request = Request(measures, top_k, tracked, ((0, n_vocab - 1), (1,)))
    asked = {name: torch.randint(-1, n_vocab, (n_rows,), generator=draw) for name in sorted(measures & ASKED)}
    final = choose.randrange(n_places)

    found = fused.read_rows(head, states, request, asked, final)
    expected = plain.read_rows(head, states, request, asked, final)

    assert found.keys() == expected.keys()
    z_PRV = torch.stack([logits(head, state) for state in states])
    for name, values in expected.items():
        mine = found[name]
        assert (mine.shape, mine.dtype) == (values.shape, values.dtype), name
        if mine.is_floating_point():
            # A near-tie for the last layer's argmax may be decided the other way: its logit is then another token's.
            if not name.startswith("final_top1"):
                torch.testing.assert_close(mine, values, rtol=2e-4, atol=2e-4, equal_nan=True)
            continue
        assert torch.equal(mine < 0, values < 0), name
        if name == "topk_id":
            picked = z_PRV.gather(2, mine.long().clamp(min=0))
            best = z_PRV.nan_to_num(0).sort(dim=2, descending=True).values[..., :top_k]
            assert ((picked - best).abs() <= near(best))[mine >= 0].logical_or(picked[mine >= 0] == -math.inf).all()
        elif name != "final_top1_rank":
            ids = asked[name.removesuffix("_rank")][:, None] if name != "tracked_rank" else torch.tensor([tracked])
            rank_PRQ = mine if mine.dim() == 3 else mine[..., None]
            for q in range(rank_PRQ.shape[2]):
                z_PR1 = z_PRV.gather(2, ids[:, q].clamp(min=0).expand(n_places, n_rows)[..., None])
                least = (z_PRV > z_PR1 + near(z_PR1)).sum(2)
                most = (z_PRV > z_PR1 - near(z_PR1)).sum(2)
                known = rank_PRQ[..., q] >= 0
                assert ((least <= rank_PRQ[..., q]) & (rank_PRQ[..., q] <= most))[known].all(), name
