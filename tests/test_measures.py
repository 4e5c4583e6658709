"""Measures: what each is, from a model's own states and logits, computed another way."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import lenspipe
from lenspipe.models.lens_model import LensModel
from lenspipe.variables import MEASURES

TEXTS = ["the cat sat on the mat", "a dog ran", "on"]


@pytest.fixture(scope="module")
def model() -> LensModel:
    return LensModel.load(Path(__file__).parents[1] / "data/tiny-model", device="cpu")


@pytest.fixture(scope="module")
def ds(model: LensModel) -> xr.Dataset:
    return lenspipe.logit_lens(model, TEXTS, measures=MEASURES, top_k=3)


def logits_of(model: LensModel, states: torch.Tensor) -> np.ndarray:
    return model.unembed.logits(states).double().numpy()


def test_targets_look_as_far_ahead_as_their_name_says(ds: xr.Dataset, model: LensModel) -> None:
    ids = [model.to_tokens(text).tolist() for text in TEXTS]
    for name, offset in (("target_0", 0), ("target", 1), ("target_2", 2), ("target_3", 3)):
        expected = [token for text in ids for token in [*text[offset:], *[-1] * min(offset, len(text))]]
        assert ds[f"{name}_id"].values.tolist() == expected
        missing = np.array(expected) < 0
        assert (ds[f"{name}_rank"].values[:, missing] == -1).all()
        assert np.isnan(ds[f"{name}_logit"].values[:, missing]).all()
        assert not np.isnan(ds[f"{name}_logit"].values[:, ~missing]).any()


def test_every_measure_is_that_of_the_states_and_logits_in_float64(ds: xr.Dataset, model: LensModel) -> None:
    sites = [str(site) for site in ds.site.values]
    ids = model.to_tokens(TEXTS[0])
    states = model.capture(ids, sites)
    rows = np.flatnonzero(ds.document.values == 0)
    final = logits_of(model, states[sites[-1]])
    log_w = final - np.logaddexp.reduce(final, axis=1, keepdims=True)
    for layer, site in enumerate(sites):
        z = logits_of(model, states[site])
        log_q = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
        q, w = np.exp(log_q), np.exp(log_w)
        log_m = np.logaddexp(log_q, log_w) - np.log(2)
        h, last = states[site].double().numpy(), states[sites[-1]].double().numpy()
        best = final.argmax(axis=1)[:, None]
        expected = {
            "varentropy": (q * log_q**2).sum(1) - (q * log_q).sum(1) ** 2,
            "renyi2": -np.log((q**2).sum(1)),
            "margin": np.sort(z)[:, -1] - np.sort(z)[:, -2],
            "kl_reverse": (q * (log_q - log_w)).sum(1),
            "js_final": (w * (log_w - log_m) + q * (log_q - log_m)).sum(1) / 2,
            "final_top1_rank": (z > np.take_along_axis(z, best, 1)).sum(1),
            "final_top1_logit": np.take_along_axis(z, best, 1)[:, 0],
            "residual_norm": np.sqrt((h * h).sum(1)),
            "cosine_final": (h * last).sum(1) / np.sqrt((h * h).sum(1) * (last * last).sum(1)),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(ds[name].values[layer, rows], values, rtol=2e-5, atol=1e-5, err_msg=name)


def test_the_last_layer_compared_with_itself_is_itself(ds: xr.Dataset) -> None:
    last = ds.isel(layer=-1)
    for name in ("kl_final", "kl_reverse", "js_final", "final_top1_rank"):
        assert (last[name] == 0).all()
    np.testing.assert_allclose(last.cosine_final, 1, rtol=1e-6)
    np.testing.assert_array_equal(last.final_top1_logit, last.topk_logit.isel(k=0))


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_each_measure_may_be_asked_for_alone(name: str, ds: xr.Dataset, model: LensModel) -> None:
    alone = lenspipe.logit_lens(model, TEXTS, measures=[name], top_k=3, layers=[1, 2])
    for variable in set(alone.data_vars):
        xr.testing.assert_equal(
            alone[variable].drop_vars("layer", errors="ignore"),
            ds[variable].isel(layer=[1, 2]).drop_vars("layer") if "layer" in ds[variable].dims else ds[variable],
        )
