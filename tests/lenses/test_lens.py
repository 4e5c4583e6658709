"""Lens: maps agree with plain float64 loops, and each layer has its own map or none."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenspipe.errors import RequestError
from lenspipe.lenses.lens import LOGIT, Lens, Translator

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")


def grid(draw, *shape):
    """Numbers on a coarse grid, so that float32 products of them are exact."""
    return draw.integers(-8, 9, shape) / 8


def translator(weight, bias, residual):
    tensor = None if bias is None else torch.tensor(bias, dtype=torch.float32)
    return Translator(torch.tensor(weight, dtype=torch.float32), tensor, residual)


def by_loops(state, weight, bias, residual):
    """The map, one number at a time."""
    mapped = np.zeros_like(state)
    for row in range(state.shape[0]):
        for i in range(state.shape[1]):
            mapped[row, i] = sum(float(weight[i, j]) * float(state[row, j]) for j in range(state.shape[1]))
            mapped[row, i] += (0.0 if bias is None else bias[i]) + (state[row, i] if residual else 0.0)
    return mapped


@given(
    seed=st.integers(0, 2**32 - 1),
    n_rows=st.integers(0, 4),
    width=st.integers(1, 6),
    with_bias=st.booleans(),
    residual=st.booleans(),
)
def test_a_translator_agrees_with_plain_loops(seed, n_rows, width, with_bias, residual):
    draw = np.random.default_rng(seed)
    state, weight = grid(draw, n_rows, width), grid(draw, width, width)
    bias = grid(draw, width) if with_bias else None
    mapped = translator(weight, bias, residual).apply(torch.tensor(state, dtype=torch.float32))
    assert mapped.dtype == torch.float32
    np.testing.assert_array_equal(mapped.numpy(), by_loops(state, weight, bias, residual))


def test_a_translator_leaves_the_state_as_it_was():
    state = torch.ones(2, 3)
    translator(np.eye(3), np.ones(3), True).apply(state)
    assert torch.equal(state, torch.ones(2, 3))


def test_a_lens_uses_the_map_of_the_layer_asked_for():
    draw = np.random.default_rng(1)
    weights = {layer: grid(draw, 3, 3) for layer in (0, 1, 2)}
    lens = Lens("a", "jacobian", {layer: translator(w, None, False) for layer, w in weights.items()}, 3)
    state = grid(draw, 4, 3)
    for layer, weight in weights.items():
        for depth in (layer, float(layer)):
            mapped = lens.apply(torch.tensor(state, dtype=torch.float32), depth)
            np.testing.assert_array_equal(mapped.numpy(), by_loops(state, weight, None, False))


@pytest.mark.parametrize("kind", ["tuned", "jacobian"])
def test_the_last_layer_without_a_map_is_the_identity(kind):
    lens = Lens("a", kind, {1: translator(2 * np.eye(3), None, False)}, 3)
    state = torch.randn(2, 3)
    assert lens.covers(3)
    assert lens.apply(state, 3) is state


def test_the_last_layer_with_a_map_uses_it():
    lens = Lens("a", "jacobian", {3: translator(2 * np.eye(2), None, False)}, 3)
    assert torch.equal(lens.apply(torch.ones(1, 2), 3), torch.full((1, 2), 2.0))


@pytest.mark.parametrize("layer", [0, 0.5, 2, 2.5, 4, -1])
def test_a_layer_without_a_map_is_refused_with_the_layers_there_are(layer):
    lens = Lens("my-lens", "jacobian", {1: translator(np.eye(2), None, False)}, 3)
    assert not lens.covers(layer)
    with pytest.raises(RequestError, match=rf"my-lens has no map for layer {layer:g}: it covers layers 1, 3;"):
        lens.apply(torch.ones(1, 2), layer)


@pytest.mark.parametrize("layer", [0, 0.5, 1, 17, 99.5])
def test_the_logit_lens_is_the_identity_at_every_layer(layer):
    state = torch.randn(2, 3)
    assert LOGIT.kind == "logit"
    assert LOGIT.covers(layer)
    assert LOGIT.apply(state, layer) is state


def test_a_lens_of_a_layer_that_the_model_lacks_cannot_be_made():
    with pytest.raises(ValueError, match="3 blocks has no layer 4"):
        Lens("a", "tuned", {4: translator(np.eye(2), None, True)}, 3)


@pytest.mark.parametrize("weight, bias", [(np.ones((2, 3)), None), (np.eye(2), np.ones(3)), (np.ones(2), None)])
def test_a_translator_that_is_not_square_cannot_be_made(weight, bias):
    with pytest.raises(ValueError, match="square"):
        translator(weight, bias, False)


def test_a_lens_on_another_device_has_the_same_maps():
    lens = Lens("a", "tuned", {0: translator(np.eye(2), np.ones(2), True), 1: translator(np.eye(2), None, True)}, 2)
    moved = lens.to("meta")
    assert {one.weight_DD.device.type for one in moved.translators.values()} == {"meta"}
    assert moved.translators[0].bias_D.device.type == "meta"
    assert moved.translators[1].bias_D is None
    assert (moved.name, moved.kind, moved.n_blocks) == ("a", "tuned", 2)


def test_a_lens_travels_to_another_process():
    lens = Lens("a", "tuned", {0: translator(np.eye(2), np.ones(2), True)}, 1)
    again = pickle.loads(pickle.dumps(lens))
    state = torch.randn(3, 2)
    assert torch.equal(again.apply(state, 0), lens.apply(state, 0))
