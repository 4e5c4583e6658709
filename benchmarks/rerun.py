"""The cached rerun: the wall time of `lenspipe run` when nothing is left to do, on a store of 1,000 shards.

Whole processes are timed, as a person waits for them. Building the store is a first run like any other: minutes.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import lenspipe
from benchmarks.measure import report
from lenspipe.corpora.documents import read_documents

ROOT = Path(__file__).parents[1]
SHARDS = 1000
RUNS = 3
RECIPE = """
[model]
source = "{root}/data/tiny-model"
[corpus]
source = "corpus.jsonl"
[capture]
layers = [0, 2, -1]
[read]
top_k = 4
[run]
store = "store"
shard_size = 1    # a document each
device = "cpu"
"""


def write_recipe(folder: Path) -> Path:
    """Write a corpus of short documents, a shard each, and a recipe for it."""
    words = (ROOT / "data/corpora/prose.txt").read_text().split()
    draw = random.Random(0)
    texts = [f"{number} {' '.join(draw.choices(words, k=6))}" for number in range(SHARDS)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(root=ROOT))
    return recipe


def seconds(recipe: Path) -> float:
    """Time one `lenspipe run`, from the start of its process to the end, with no Prefect server named."""
    private = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    start = time.perf_counter()
    command = [sys.executable, "-m", "lenspipe.cli", "run", str(recipe), "-q"]
    subprocess.run(command, env=private, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def corpus_reads(recipe: Path) -> int:
    """Count how often one cached run begins to read the corpus."""
    with patch("lenspipe.plan.read_documents", side_effect=read_documents) as reading:
        lenspipe.run(lenspipe.load_recipe(recipe))
    return reading.call_count


def cases() -> list[tuple[str, float]]:
    """Build the store and measure: name -> figure."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder))
        first = seconds(recipe)
        cached = statistics.median(seconds(recipe) for _ in range(RUNS))
        return [
            (f"first run, {SHARDS:,} shards, 3 layers, seconds", first),
            (f"cached rerun, {SHARDS:,} shards, 3 layers, seconds", cached),
            ("corpus reads of a cached rerun", float(corpus_reads(recipe))),
        ]


if __name__ == "__main__":
    report("Rerun", "python -m benchmarks.rerun", ["figure", "value"], cases())
