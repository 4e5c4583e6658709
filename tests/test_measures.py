"""Measures: what each is, from a model's own states and logits, computed another way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import lenspipe
from lenspipe.errors import RequestError
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


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


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
        before = states[sites[max(layer - 1, 0)]].double().numpy()
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
            "cosine_previous": cosine(h, before) if layer else np.full(len(h), np.nan),
            "cosine_final": cosine(h, last),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(ds[name].values[layer, rows], values, rtol=2e-5, atol=1e-5, err_msg=name)


def test_the_last_layer_compared_with_itself_is_itself(ds: xr.Dataset) -> None:
    last = ds.isel(layer=-1)
    for name in ("kl_final", "kl_reverse", "js_final", "final_top1_rank"):
        assert (last[name] == 0).all()
    np.testing.assert_allclose(last.cosine_final, 1, rtol=1e-6)
    np.testing.assert_array_equal(last.final_top1_logit, last.topk_logit.isel(k=0))


def test_the_marginal_is_the_mean_probability_over_plain_tokens(ds: xr.Dataset, model: LensModel) -> None:
    assert ds.marginal.dims == ("layer", "vocab")
    assert ds.is_special.any()
    plain = ~ds.is_special.values
    for layer, site in enumerate(map(str, ds.site.values)):
        z = np.concatenate([logits_of(model, model.capture(model.to_tokens(text), site)[site]) for text in TEXTS])
        p = np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
        np.testing.assert_allclose(ds.marginal.values[layer], p[plain].mean(axis=0), rtol=2e-5, atol=1e-9)


def test_first_choices_count_plain_tokens_by_their_argmax(ds: xr.Dataset) -> None:
    found = ds.lens.first_choices()
    assert found.dims == ("layer", "vocab")
    plain = np.flatnonzero(~ds.is_special.values)
    for layer in range(ds.sizes["layer"]):
        ids = [int(ds.topk_id[layer, row, 0]) for row in plain]
        assert found.values[layer].tolist() == [ids.count(token) for token in range(ds.sizes["vocab"])]


@pytest.mark.parametrize("bins", [1, 4, 300])
def test_calibration_sorts_rows_into_bins_of_confidence(ds: xr.Dataset, bins: int) -> None:
    found = ds.lens.calibration(bins)
    for layer in range(ds.sizes["layer"]):
        held: dict[int, list[tuple[float, bool]]] = {i: [] for i in range(bins)}
        for row in range(ds.sizes["token"]):
            if not ds.is_special[row] and ds.target_id[row] >= 0:
                p = float(np.exp(ds.topk_logit[layer, row, 0] - ds.logsumexp[layer, row]))
                held[min(int(np.float32(p) * bins), bins - 1)].append((p, int(ds.target_rank[layer, row]) == 0))
        total = sum(map(len, held.values()))
        error = 0.0
        for i, rows in held.items():
            assert found["count"][layer, i] == len(rows)
            if rows:
                p, right = (sum(x) / len(rows) for x in zip(*rows, strict=True))
                np.testing.assert_allclose(
                    [found.confidence[layer, i], found.accuracy[layer, i]], [p, right], rtol=1e-5
                )
                error += len(rows) / total * abs(p - right)
            else:
                assert np.isnan(found.accuracy[layer, i])
        np.testing.assert_allclose(found.ece[layer], error, rtol=1e-5)


def test_what_calibration_lacks_is_named(ds: xr.Dataset) -> None:
    with pytest.raises(RequestError, match="calibration needs logsumexp, target"):
        ds.drop_vars(["logsumexp", "target_rank"]).lens.calibration()
    with pytest.raises(RequestError, match="bins is 0"):
        ds.lens.calibration(0)


def test_the_probability_of_token_sets(model: LensModel, tmp_path: Path) -> None:
    (tmp_path / "sets.toml").write_text('ends = ["at", "he"]\nmixed = ["c", 3]\nall = ' + str([*range(20)]))
    found = lenspipe.logit_lens(model, TEXTS, measures=["logsumexp"], token_sets=tmp_path / "sets.toml")
    assert found.set.values.tolist() == ["ends", "mixed", "all"]
    assert found.set_mass.dims == ("layer", "token", "set")
    ids = {name: model.require_tokenizer().single(name, model.facts.vocab_size) for name in ("at", "he", "c")}
    states = model.capture(model.to_tokens(TEXTS[1]), "resid_post.0")["resid_post.0"]
    z = logits_of(model, states)
    p = np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
    sets = [[ids["at"], ids["he"]], [ids["c"], 3], list(range(20))]
    mine = found.sel(layer=1, token=found.document.values == 1).set_mass
    np.testing.assert_allclose(mine, np.stack([p[:, tokens].sum(1) for tokens in sets], axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no token sets"),
        ("a = 3", "the set 'a' must be a list"),
        ("a = []", "the set 'a' must be a list"),
        ("a = [true]", "the set 'a' must be a list"),
        ('a = ["cat", "cat"]', "holds 'cat' twice"),
        ("a = [1, 99999999]", "id 99999999"),
        ('a = ["the cat sat"]', "is 6 tokens"),
        ("a = [", "cannot read the token sets"),
    ],
)
def test_a_file_that_holds_no_token_sets_is_refused(text: str, message: str, model: LensModel, tmp_path: Path) -> None:
    (tmp_path / "sets.toml").write_text(text)
    with pytest.raises(RequestError, match=message):
        lenspipe.logit_lens(model, TEXTS, token_sets=tmp_path / "sets.toml")


def test_one_token_by_two_names_in_a_set_is_refused(model: LensModel, tmp_path: Path) -> None:
    at = model.require_tokenizer().single("at", model.facts.vocab_size)
    (tmp_path / "sets.json").write_text(f'{{"a": ["at", {at}]}}')
    with pytest.raises(RequestError, match="are one token"):
        lenspipe.logit_lens(model, TEXTS, token_sets=tmp_path / "sets.json")


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_each_measure_may_be_asked_for_alone(name: str, ds: xr.Dataset, model: LensModel) -> None:
    alone = lenspipe.logit_lens(model, TEXTS, measures=[name], top_k=3, layers=[1, 2])
    for variable in set(alone.data_vars):
        xr.testing.assert_equal(
            alone[variable].drop_vars("layer", errors="ignore"),
            ds[variable].isel(layer=[1, 2]).drop_vars("layer") if "layer" in ds[variable].dims else ds[variable],
        )


@pytest.mark.usefixtures("prefect_server")
def test_a_run_over_few_layers_captures_what_its_measures_compare_with(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "sets.toml").write_text('ends = ["at", "he"]\nfirst = [0, 1, 2, 3]\n')
    read = {**values["read"], "measures": list(MEASURES), "token_sets": str(tmp_path / "sets.toml")}
    kept = lenspipe.open_dataset(lenspipe.run(lenspipe.make_recipe({**values, "read": read})))
    assert kept.set.values.tolist() == ["ends", "first"]
    few = {**values, "read": read, "capture": {"layers": [2, 3], "residuals": "stream"}}
    few["run"] = {**values["run"], "store": str(tmp_path / "another")}
    streamed = lenspipe.open_dataset(lenspipe.run(lenspipe.make_recipe(few)))
    assert streamed.cosine_previous.notnull().all()
    for name in kept.data_vars:
        expected = kept[name].sel(layer=[2, 3]) if "layer" in kept[name].dims else kept[name]
        np.testing.assert_array_equal(streamed[name], expected, err_msg=str(name))
