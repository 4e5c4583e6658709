"""Precision: what `model` and `float32` round, shown on a bfloat16 model against the same steps written out."""

import numpy as np
import pytest
import torch

from lenspipe.grid import Site
from lenspipe.models.lens_model import LensModel, open_model
from lenspipe.prompts import logit_lens
from tests.families.tiny import build

IDS = torch.tensor([[5, 17, 33, 88, 41, 9, 60, 12]])
SITE = Site("resid_post", 1)


@pytest.fixture(scope="module")
def half() -> LensModel:
    return open_model(build("llama", torch.bfloat16))


@pytest.fixture(scope="module")
def state(half: LensModel) -> torch.Tensor:
    return half.states(IDS, torch.ones_like(IDS), [SITE])[SITE][0]


def by_hand(half: LensModel, state: torch.Tensor, rounded: bool) -> torch.Tensor:
    """RMS norm and product in float64, the normed state rounded where the model rounds it, or nowhere."""
    norm, wide = half.hf.model.norm, state.detach().double()
    with torch.no_grad():
        normed = wide / torch.sqrt(wide.square().mean(1, keepdim=True) + norm.variance_epsilon)
        operand = (norm.weight * normed.bfloat16()).double() if rounded else norm.weight.double() * normed
        return operand @ half.hf.lm_head.weight.double().T


def test_model_rounds_the_normed_state_and_keeps_float32_logits(half: LensModel, state: torch.Tensor) -> None:
    ours = half.unembed.at("model").logits(state)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), by_hand(half, state, rounded=True), rtol=0, atol=2e-5)
    assert not torch.equal(ours, ours.bfloat16().float())


def test_float32_rounds_nothing(half: LensModel, state: torch.Tensor) -> None:
    ours = half.unembed.at("float32").logits(state)
    torch.testing.assert_close(ours.double(), by_hand(half, state, rounded=False), rtol=0, atol=2e-5)


def test_the_two_differ_by_more_than_either_errs(half: LensModel, state: torch.Tensor) -> None:
    apart = half.unembed.at("float32").logits(state) - half.unembed.at("model").logits(state)
    assert apart.abs().max() > 1e-3


def test_float32_leaves_the_model_as_it_is(half: LensModel) -> None:
    half.unembed.at("float32")
    assert half.hf.model.norm.weight.dtype == torch.bfloat16


def test_a_float32_model_has_one_precision() -> None:
    unembed = open_model(build("llama")).unembed
    assert unembed.at("float32") is unembed.at("model")


def test_a_bfloat16_gemma_reads_as_its_own_logits_before_their_rounding() -> None:
    """The model rounds after the product, the division by the cap, tanh and the multiplication: at most 4 roundings."""
    model = build("gemma2", torch.bfloat16)
    ds = logit_lens(model, IDS[0], top_k=97, measures=["topk"])
    with torch.no_grad():
        theirs = model(IDS).logits[0].float().numpy()
    last = ds.isel(layer=-1)
    ours = np.empty_like(theirs)
    np.put_along_axis(ours, last["topk_id"].values.astype(np.int64), last["topk_logit"].values, axis=1)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=4 * 2**-9 * np.abs(theirs).max())


def test_a_float16_model_is_read() -> None:
    opened = open_model(build("gpt2", torch.float16))
    assert opened.gate.difference <= 1e-3
