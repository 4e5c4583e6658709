"""Numbers: what each stage makes of a small run. `python -m tests.golden.numbers` writes those of today."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import lenspipe
from lenspipe.plan import make_plan
from lenspipe.recipe import Recipe, make_recipe
from lenspipe.stages.work import STAGES, VERSION
from lenspipe.storage.arrays import open_residual, read_table
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.variables import MEASURES
from tests.chaos.small import carry_out
from tests.conftest import ROOT

FOLDER = Path(__file__).parent
KEYS = FOLDER / "keys.json"
EVERY = 4
"""Of residuals, one row in so many is kept."""

Arrays = dict[str, np.ndarray[Any, Any]]


def recipe(folder: Path) -> Recipe:
    """Two shards, windows of long documents, three layers and a branch, every measure."""
    sets = folder / "sets.toml"
    sets.write_text('ends = ["at", "he"]\nfirst = [0, 1, 2, 3]\n')
    return make_recipe(
        {
            "model": {"source": str(ROOT / "data/tiny-model")},
            "corpus": {
                "source": str(ROOT / "data/corpora/recall.jsonl"), "limit": 5, "columns": ["category"],
                "max_length": 16, "stride": 9,
            },
            "capture": {"sites": ["resid_pre.0", "resid_mid.1", "mlp_out.2", "resid_post.3"]},
            "read": {
                "measures": list(MEASURES), "top_k": 3, "tracked": [" the"], "answer": "answer",
                "token_sets": str(sets),
            },
            "run": {"store": str(folder / "store"), "shard_size": 100, "device": "cpu"},
        }
    )  # fmt: skip


def compute(folder: Path) -> tuple[dict[str, Arrays], dict[str, list[str]]]:
    """Carry the run out: per stage, named arrays; and all keys."""
    asked = recipe(folder)
    path = carry_out(asked)
    store, plan = ArtifactStore(asked.store), make_plan(asked)
    found: dict[str, Arrays] = {stage: {} for stage in STAGES}
    keys: dict[str, list[str]] = {stage: [] for stage in STAGES}
    for stage, key in plan.artifacts():
        keys[stage].append(key)
    for stage in ("encode", "read"):
        for i, key in enumerate(keys[stage]):
            found[stage] |= {f"{i}/{name}": values for name, values in read_table(store, stage, key).items()}
    for i, key in enumerate(keys["capture"]):
        array = open_residual(store, key).array
        found["capture"][f"{i}/residual"] = array[:][::EVERY]
    ds = lenspipe.open_dataset(path)
    for name, variable in ds.variables.items():
        if variable.dtype.kind in "iufb" and name != "marginal":
            found["assemble"][str(name)] = variable.values
    return found, keys


def file_of(stage: str) -> Path:
    """Where the numbers of a stage's current version lie."""
    return FOLDER / f"{stage}-{VERSION[stage]}.npz"


def main() -> None:
    """Write the numbers of the current versions, and the keys."""
    with tempfile.TemporaryDirectory() as folder:
        found, keys = compute(Path(folder))
    for stage, arrays in found.items():
        for old in FOLDER.glob(f"{stage}-*.npz"):
            old.unlink()
        np.savez_compressed(file_of(stage), **arrays)  # type: ignore[arg-type]
    KEYS.write_text(json.dumps(keys, indent=1) + "\n")


if __name__ == "__main__":
    main()
