"""A store holds whoever adds to it to what its tokenizer and model computed first."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import normalizers

from lenspipe.errors import DamagedArtifactError, RequestError
from lenspipe.models.facts import read_facts
from lenspipe.models.lens_model import LensModel, load_model
from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.recipe import Recipe, make_recipe
from lenspipe.stages.sample import SAMPLE, _held, hold_model, hold_tokenizer
from lenspipe.storage.arrays import read_table, write_table
from lenspipe.storage.artifacts import ArtifactStore

Values = dict[str, Any]


def opened(values: Values) -> tuple[ArtifactStore, Recipe, LensModel]:
    recipe = make_recipe(values)
    return ArtifactStore(recipe.store), recipe, load_model(recipe, read_facts(recipe))


def the_sample(store: ArtifactStore) -> str:
    (key,) = store.keys(SAMPLE)
    return key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_model_is_held_to_itself_at_every_layer(values: Values, dtype: str) -> None:
    values["model"]["dtype"] = dtype
    store, recipe, model = opened(values)
    hold_model(store, recipe, model)
    table = read_table(store, SAMPLE, the_sample(store))
    with torch.no_grad():
        given = model.hf(torch.from_numpy(table["ids"])[None]).logits[0]
    columns = torch.linspace(0, given.shape[1] - 1, 64).long()
    assert table["logits"].shape == (model.facts.n_blocks, 16, 64)
    np.testing.assert_allclose(table["logits"][-1], given[:, columns].float(), atol=0.05, rtol=0.02)
    hold_model(store, recipe, load_model(recipe, model.facts))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [0, 3])
def test_a_model_that_computes_otherwise_is_refused_from_the_block_where_it_does(
    values: Values, block: int, dtype: str
) -> None:
    values["model"]["dtype"] = dtype
    store, recipe, model = opened(values)
    hold_model(store, recipe, model)
    _held.clear()
    attention = model.hf.model.layers[block].self_attn
    attention.register_forward_hook(lambda _m, _a, output: (output[0] * 1.5, *output[1:]))
    with pytest.raises(
        RequestError, match=r"tiny-model computes other numbers than when .* or another run\.store"
    ) as e:
        hold_model(store, recipe, model)
    assert f"torch {torch.__version__.split('+')[0]}" in str(e.value)
    assert int(str(e.value).split("after block ")[1].split()[0]) >= block


def test_last_bits_are_let_pass_and_more_is_not(values: Values) -> None:
    store, recipe, model = opened(values)
    hold_model(store, recipe, model)
    norm = model.hf.model.norm
    for factor, passes in ((1 + 1e-5, True), (1 + 1e-2, False)):
        _held.clear()
        hook = norm.register_forward_hook(lambda _m, _a, output, by=factor: output * by)
        if passes:
            hold_model(store, recipe, model)
        else:
            with pytest.raises(RequestError, match=r"0\.009\d* of their standard deviation apart, at most 0\.001"):
                hold_model(store, recipe, model)
        hook.remove()


def test_a_tokenizer_that_cuts_otherwise_is_refused(values: Values) -> None:
    recipe = make_recipe(values)
    store, facts = ArtifactStore(recipe.store), read_facts(recipe)
    tokenizer = load_tokenizer(facts.folder)
    hold_tokenizer(store, facts, tokenizer)
    hold_tokenizer(store, facts, tokenizer)
    tokenizer.hf.backend_tokenizer.normalizer = normalizers.NFD()
    with pytest.raises(RequestError, match=r"the tokenizer of tiny-model cuts a sample text into other tokens"):
        hold_tokenizer(store, facts, tokenizer)
    hold_tokenizer(store, replace(facts, tokenizer_digest="of other files"), tokenizer)


@pytest.mark.parametrize("wrong", ["ids", "shape", "dtype", "versions"])
def test_a_sample_that_no_run_wrote_is_set_aside(values: Values, wrong: str) -> None:
    store, recipe, model = opened(values)
    hold_model(store, recipe, model)
    key = the_sample(store)
    _, manifest = store.open(SAMPLE, key)
    arrays = read_table(store, SAMPLE, key)
    arrays |= {"ids": {"ids": np.array([1, 10**6])}, "shape": {"logits": arrays["logits"][:1]}}.get(wrong, {})
    arrays |= {"dtype": {"ids": arrays["ids"].astype(np.float32)}}.get(wrong, {})
    versions = None if wrong == "versions" else manifest.attributes["versions"]
    store.remove(SAMPLE, key)
    with store.publish(SAMPLE, key, manifest.inputs) as draft:
        write_table(draft.folder, arrays)
        draft.attributes["versions"] = versions
    _held.clear()
    with pytest.raises(DamagedArtifactError, match="set aside"):
        hold_model(store, recipe, model)
    hold_model(store, recipe, model)
