"""Small: a run of every stage within a second, carried out without Prefect, and what its dataset holds to the bit."""

from pathlib import Path
from typing import Any

import xarray as xr

import lenspipe
from lenspipe.errors import DamagedArtifactError
from lenspipe.models.shared import shared_model
from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.plan import Plan, make_plan, publish_cut
from lenspipe.recipe import Recipe, make_recipe
from lenspipe.stages.assemble import assemble
from lenspipe.stages.capture import capture
from lenspipe.stages.encode import encode
from lenspipe.stages.read import read
from lenspipe.stages.sample import hold_model, hold_tokenizer
from lenspipe.stages.work import NamedTokens
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.owners import sweep
from tests.conftest import ROOT

ATTEMPTS = 3


def small_recipe(store: Path, residuals: str = "keep") -> Recipe:
    """Two shards at three layers, with every kind of variable."""
    return make_recipe(
        {
            "model": {"source": str(ROOT / "data/tiny-model")},
            "corpus": {"source": str(ROOT / "data/corpora/recall.jsonl"), "limit": 6, "columns": ["category"]},
            "capture": {"layers": [0, 2, 4], "residuals": residuals},
            "read": {"top_k": 3, "answer": "answer", "tracked": [" the"]},
            "run": {"store": str(store), "shard_size": 120, "device": "cpu"},
        }
    )


def carry_out(recipe: Recipe) -> Path:
    """Do what `lenspipe run` does, damage on the way included; returns the dataset's path."""
    for attempt in range(ATTEMPTS):
        plan = make_plan(recipe)
        try:
            if not plan.is_done:
                sweep(recipe.store)
                _make(plan)
            return plan.dataset_path
        except DamagedArtifactError:
            if attempt + 1 == ATTEMPTS:
                raise
            store = ArtifactStore(recipe.store)
            for name in plan.artifacts():
                if store.is_damaged(*name, deep=True):
                    store.set_aside(*name)
    raise AssertionError("unreachable")


def _make(plan: Plan) -> None:
    recipe, facts, store = plan.recipe, plan.facts, ArtifactStore(plan.recipe.store)
    tokenizer = load_tokenizer(facts.folder, False)
    named = NamedTokens.find(recipe, lambda token: tokenizer.single(token, facts.vocab_size))
    publish_cut(plan)

    def nothing(_: int) -> None: ...

    hold_tokenizer(store, facts, tokenizer)
    todo = [item.shard for item in plan.encode]
    encode(store, recipe, facts, tokenizer, todo, nothing)
    if plan.loads_model:
        model = shared_model(recipe, facts)
        hold_model(store, recipe, model)
        for item in plan.capture:
            with item.claimed(store, "capture") as cells:
                capture(store, recipe, model, item.shard, cells, nothing)
        for item in plan.read:
            with item.claimed(store, "read") as cells:
                read(store, recipe, model, item.shard, cells, named, item.shard.index in plan.stream, nothing)
    if plan.assemble:
        with store.claim("assemble", [plan.dataset]):
            assemble(store, recipe, facts, tokenizer, plan.sites, plan.shards, named, nothing)


def contents(path: Path) -> dict[str, Any]:
    """All that a dataset holds: per variable its type, dimensions and bytes; and the attributes."""
    ds: xr.Dataset = lenspipe.open_dataset(path).load()
    found: dict[str, Any] = {"": {name: value for name, value in ds.attrs.items() if name != "recipe"}}
    for name, variable in ds.variables.items():
        values = variable.values
        spelled = values.tobytes() if values.dtype.kind in "iufb" else repr(values.tolist()).encode()
        found[str(name)] = (values.dtype.str, variable.dims, spelled)
    return found
