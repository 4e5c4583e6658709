"""The pipeline's stages against their two floors: the bare forward pass and the bare products. `make bench`.

SmolLM2 on the demo's texts, in one process and without Prefect. The bare forward runs the model's blocks over the same
batches with no hooks and no LM head; the bare products are one torch.mm of all states a layer, into an array that is
there already, 1,024 rows at once. The floors are timed before, between and after stream and keep, shard by shard.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.measure import Row, report, timed
from lenspipe.models.lens_model import LensModel
from lenspipe.models.shared import shared_model
from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.plan import make_plan
from lenspipe.recipe import Recipe, load_recipe
from lenspipe.runs import plan_recipe
from lenspipe.stages.assemble import assemble
from lenspipe.stages.capture import capture, padded
from lenspipe.stages.encode import encode, load_tokens
from lenspipe.stages.read import read
from lenspipe.stages.work import NamedTokens
from lenspipe.storage.artifacts import ArtifactStore

ROOT = Path(__file__).parents[1]
NOBODY = NamedTokens((), {})
silent: Callable[[int], None] = lambda _: None  # noqa: E731 -- a default argument


def bare_forward(model: LensModel, store: ArtifactStore, key: str, batch_tokens: int) -> None:
    """Run the blocks over a shard."""
    tokens = load_tokens(store, key)
    for batch in tokens.batches(batch_tokens):
        ids, mask = padded(tokens, batch)
        with torch.no_grad():
            model.hf.base_model(input_ids=ids, attention_mask=mask, use_cache=False)


def bare_products(model: LensModel, n_rows: int, times: int, out: torch.Tensor) -> None:
    """Multiply by the unembedding, once a site, and drop the logits."""
    weight = model.unembed.head.weight_VD
    states = torch.randn(n_rows, weight.shape[1]).to(weight.dtype)
    for _ in range(times):
        for start in range(0, n_rows, len(out)):
            part = states[start : start + len(out)]
            torch.mm(part, weight.T, out=out[: len(part)])


def stages(recipes: dict[str, Recipe]) -> Iterator[Row]:
    """Seconds of every stage in every mode over those of the floors."""
    plans = {mode: make_plan(recipe) for mode, recipe in recipes.items()}
    plan = next(iter(plans.values()))
    model, tokenizer = shared_model(plan.recipe, plan.facts), load_tokenizer(plan.facts.folder)
    seconds: dict[str, float] = defaultdict(float)
    out = torch.empty(1024, plan.facts.vocab_size, dtype=model.unembed.head.weight_VD.dtype)
    rows = 0
    bare_products(model, 64, 1, out)  # warm
    for mode, planned in plans.items():
        store, shards = ArtifactStore(planned.recipe.store), planned.shards
        work = lambda s=store, p=planned, all=shards: encode(s, p.recipe, p.facts, tokenizer, all, silent)  # noqa: E731
        seconds[f"{mode} encode"] = timed(work)
    for i, shard in enumerate(plan.shards):
        store, batch = ArtifactStore(plan.recipe.store), plan.recipe.run.batch_tokens
        n = load_tokens(store, shard.encode).n_tokens
        rows += n

        def floors(store=store, shard=shard, n=n, batch=batch) -> None:
            seconds["forward"] += timed(lambda: bare_forward(model, store, shard.encode, batch)) / 3
            seconds["product"] += timed(lambda: bare_products(model, n, len(plan.sites), out)) / 3

        floors()
        for mode, planned in plans.items():
            into, recipe, its = ArtifactStore(planned.recipe.store), planned.recipe, planned.shards[i]
            if mode == "keep":
                cells = [*its.cells, *its.beside]
                seconds[f"{mode} capture"] += timed(lambda: capture(into, recipe, model, its, cells, silent))
            streams = mode == "stream"
            seconds[f"{mode} read"] += timed(lambda: read(into, recipe, model, its, its.cells, NOBODY, streams, silent))
            floors()
    for mode, p in plans.items():
        store = ArtifactStore(p.recipe.store)
        seconds[f"{mode} assemble"] = timed(
            lambda: assemble(store, p.recipe, p.facts, tokenizer, p.sites, p.shards, NOBODY, silent)
        )
    floor = seconds["forward"] + seconds["product"]
    yield "tokens", float(rows)
    yield "tokens per second of the floors", rows / floor
    yield "forward's share of the floors", seconds["forward"] / floor
    for mode in plans:
        parts = {name: value for name, value in seconds.items() if name.startswith(mode)}
        yield f"{mode}: all stages / (forward + products)", sum(parts.values()) / floor
        for name, value in parts.items():
            yield f"{name} / (forward + products)", value / floor
    yield "keep capture / forward", seconds["keep capture"] / seconds["forward"]
    yield "keep read / products", seconds["keep read"] / seconds["product"]
    yield "stream read / (forward + products)", seconds["stream read"] / floor


def main() -> None:
    """Measure, print, and write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipes = {}
        for mode in ("stream", "keep"):
            where = [f"run.store={json.dumps(f'{folder}/{mode}')}", f"capture.residuals={json.dumps(mode)}"]
            where.append("run.shard_size=200_000")
            recipes[mode] = load_recipe(ROOT / "data/recipes/demo.toml", where)
            plan_recipe(recipes[mode], print)
        report("Pipeline", "python -m benchmarks.pipeline", ["figure", "value"], list(stages(recipes)))


if __name__ == "__main__":
    main()
