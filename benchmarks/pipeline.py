"""Benchmarks: the readout against the bare matrix product, and a run against its two floors, in one process.

Every figure is a ratio of medians of interleaved pairs: absolute times mean little on shared machines. Writes
benchmarks/results/spine.md beside printing it. `make bench`.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lenspipe.kernels.readout import Arithmetic, Head, Request, log_softmax, logits, read_rows, rows_per_block
from lenspipe.models.lens_model import LensModel
from lenspipe.models.shared import shared_model
from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.plan import make_plan
from lenspipe.recipe import Recipe, load_recipe, make_recipe
from lenspipe.runs import plan_recipe
from lenspipe.stages.assemble import assemble, dataset_path
from lenspipe.stages.capture import capture, padded
from lenspipe.stages.encode import encode, load_tokens
from lenspipe.stages.read import read
from lenspipe.storage.artifacts import ArtifactStore

ROOT = Path(__file__).parents[1]
HEADS = {"SmolLM2 576 x 49,152": (576, 49152), "GPT-2 768 x 50,257": (768, 50257)}
MINIMAL = Request(frozenset({"target"}), 1)
DEFAULT = Request(frozenset({"topk", "logsumexp", "entropy", "target"}), 10)
WITH_KL = Request(DEFAULT.measures | {"kl_final"}, 10)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(work: Callable[[], object], floor: Callable[[], object], pairs: int) -> float:
    """Median of work / floor over interleaved pairs, after one warm-up."""
    work()
    floor()
    return statistics.median(timed(work) / timed(floor) for _ in range(pairs))


def readout_rows(rows: int, pairs: int) -> list[tuple[str, float]]:
    """Measure the kernel on random operands, at the block size that it chooses."""
    found = []
    for name, (width, vocab) in HEADS.items():
        torch.manual_seed(0)
        head = Head(torch.randn(vocab, width) * 0.1, None, Arithmetic())
        states, ids = torch.randn(rows, width), torch.randint(0, vocab, (rows,))
        none = torch.full((rows,), -1)
        height = rows_per_block(2**30, head, 31)
        blocks = [slice(i, min(i + height, rows)) for i in range(0, rows, height)]
        final = log_softmax(logits(head, states[blocks[0]]))

        def product(head: Head = head, states: torch.Tensor = states) -> None:
            torch.mm(states, head.weight_VD.T)

        for label, request in (("target only", MINIMAL), ("default", DEFAULT), ("default and kl_final", WITH_KL)):

            def work(request: Request = request, head: Head = head, states: torch.Tensor = states) -> None:
                for at in blocks:
                    prepared = final[: len(states[at])] if "kl_final" in request.measures else None
                    read_rows(head, states[at], request, ids[at], none[at], prepared)

            found.append((f"{name}, {label} / bare product", ratio(work, product, pairs)))
    return found


def pipeline(recipe: Recipe) -> list[tuple[str, float]]:
    """Run all stages without Prefect, beside a bare forward pass and the bare products, on the demo model."""
    plan = make_plan(recipe)
    store, facts = ArtifactStore(recipe.store), plan.facts
    tokenizer = load_tokenizer(facts.folder)
    model = shared_model(recipe, facts)
    silent: Callable[[int], None] = lambda _: None  # noqa: E731 -- a default argument
    seconds = {"encode": timed(lambda: encode(store, recipe, facts, tokenizer, plan.shards, silent))}
    seconds["capture"] = seconds["read"] = forward = product = 0.0
    rows = 0
    for shard in plan.shards:
        cells = [*shard.cells, *([shard.final] if shard.final else [])]
        forward += timed(lambda: bare_forward(model, store, shard.encode, recipe.run.batch_tokens))
        seconds["capture"] += timed(lambda: capture(store, recipe, model, shard, cells, silent))
        n = load_tokens(store, shard.encode).n_tokens
        rows += n
        states = torch.randn(n, facts.d_model)
        product += timed(lambda: bare_products(states, model, len(plan.sites)))
        seconds["read"] += timed(lambda: read(store, recipe, model, shard, shard.cells, (), False, silent))
    sites, shards = plan.sites, plan.shards
    seconds["assemble"] = timed(lambda: assemble(store, recipe, facts, tokenizer, sites, shards, (), silent))
    total = sum(seconds.values())
    folder = dataset_path(store, plan.dataset)
    arrays = [path for path in folder.rglob("c/**/*") if path.is_file() and "vocab_token" not in path.parts]
    size = sum(path.stat().st_size for path in arrays)
    return [
        ("tokens", rows),
        ("capture, tokens per second", rows / seconds["capture"]),
        ("read, (layer, token) rows per second", rows * len(sites) / seconds["read"]),
        ("capture / bare forward", seconds["capture"] / forward),
        ("read / bare products", seconds["read"] / product),
        ("all stages / (forward + products)", total / (forward + product)),
        ("share neither forward nor product", 1 - (forward + product) / total),
        *((f"share of {stage}", value / total) for stage, value in seconds.items()),
        ("dataset bytes per (layer, token)", size / (rows * len(sites))),
        ("peak memory, GiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20),
    ]


def bare_forward(model: LensModel, store: ArtifactStore, key: str, batch_tokens: int) -> None:
    """Run the backbone over a shard with no hooks and no LM head."""
    tokens = load_tokens(store, key)
    for batch in tokens.batches(batch_tokens):
        ids, mask = padded(tokens, batch)
        with torch.no_grad():
            model.hf.base_model(input_ids=ids, attention_mask=mask, use_cache=False)


def bare_products(states: torch.Tensor, model: LensModel, times: int) -> None:
    """Multiply by the unembedding, once a site, and drop the logits."""
    for _ in range(times):
        torch.mm(states, model.unembed.head.weight_VD.T)


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    asked = parser.parse_args()
    found = readout_rows(asked.rows, asked.pairs)
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(ROOT / "data/recipes/demo.toml", [f"run.store={json.dumps(folder)}"])
        plan_recipe(recipe, print)
        found += pipeline(make_recipe(recipe.as_dict(), recipe.base))
    lines = ["| figure | value |", "|---|---|", *(f"| {name} | {value:,.2f} |" for name, value in found)]
    text = "\n".join(lines)
    print(text)
    target = ROOT / "benchmarks/results/spine.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(
        f"# Spine\n\n`make bench`: {torch.get_num_threads()} threads, float32, torch {torch.__version__}.\n\n{text}\n"
    )


if __name__ == "__main__":
    main()
