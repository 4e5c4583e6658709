"""Peak memory at ten times the corpus, of the stages of a run on SmolLM2: `python -m benchmarks.memory`.

Each figure is the largest resident size of a process of its own, which reads 1,000 tokens, or 10,000, in shards of
about 1,000, at three layers, 512 tokens a batch.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import report
from benchmarks.pipeline import NOBODY, ROOT, silent
from lenspipe.models.shared import shared_model
from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.plan import make_plan
from lenspipe.recipe import make_recipe
from lenspipe.runs import plan_recipe
from lenspipe.stages.assemble import assemble
from lenspipe.stages.capture import capture
from lenspipe.stages.encode import encode
from lenspipe.stages.read import read
from lenspipe.storage.artifacts import ArtifactStore

CHARACTERS = 4500
"""About 1,000 tokens."""


def peak(folder: Path, mode: str, times: int) -> float:
    """Run all stages in this process, over `times` x 1,000 tokens; its peak in MiB."""
    prose = (ROOT / "data/corpora/prose.txt").read_text()
    lines = [json.dumps({"text": prose[i : i + 1500]}) for i in range(0, times * CHARACTERS, 1500)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    asked = {
        "model": {"source": str(ROOT / "data/models/SmolLM2-135M-Instruct.Q4_1.gguf")},
        "corpus": {"source": str(folder / "corpus.jsonl")},
        "capture": {"layers": [0, 15, 30], "residuals": mode},
        "run": {"store": str(folder / "store"), "shard_size": CHARACTERS, "batch_tokens": 512},
    }
    plan_recipe(make_recipe(asked), print)  # converts the model, the first time
    recipe = make_recipe(asked)
    plan = make_plan(recipe)
    store, model = ArtifactStore(recipe.store), shared_model(recipe, plan.facts)
    tokenizer = load_tokenizer(plan.facts.folder)
    encode(store, recipe, plan.facts, tokenizer, plan.shards, silent)
    for shard in plan.shards:
        if mode == "keep":
            capture(store, recipe, model, shard, [*shard.cells, *shard.beside], silent)
        read(store, recipe, model, shard, shard.cells, NOBODY, mode == "stream", silent)
    assemble(store, recipe, plan.facts, tokenizer, plan.sites, plan.shards, NOBODY, silent)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def cases() -> Iterator[list[object]]:
    """Peaks at 1x and 10x the corpus, and their ratio."""
    for mode in ("stream", "keep"):
        peaks = []
        for times in (1, 10):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "benchmarks.memory", folder, mode, str(times)]
                done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
                peaks.append(float(done.stdout.splitlines()[-1]))
        yield [mode, *peaks, peaks[1] / peaks[0]]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(peak(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
    else:
        header = ["residuals", "peak at 1x, MiB", "at 10x, MiB", "ratio"]
        report("Memory", "python -m benchmarks.memory", header, list(cases()))
