"""Provenance: a finished run as one JSON document, enough to repeat it elsewhere and to see whether that worked.

It holds the recipe, digests of all inputs, versions, the gate's figures, and per variable a digest and a summary: no
texts and no weights.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from lenspipe.analysis import open_dataset
from lenspipe.comparison import Change, changes
from lenspipe.errors import RequestError, StoreError
from lenspipe.folders import is_url
from lenspipe.history import Record, records
from lenspipe.recipe import Recipe, make_recipe, override
from lenspipe.stages.work import dataset_path
from lenspipe.storage.artifacts import ArtifactStore

FORMAT = 1
CLOSE = 1e-4
"""Relative and absolute difference that other batches, processors and versions may make."""


def export(root: Path, record: Record) -> dict[str, Any]:
    """Write down a finished run.

    Raises:
        RequestError: its dataset is not there.
        StoreError: it cannot be read.
    """
    store = ArtifactStore(root)
    if not store.is_whole("assemble", record.dataset):
        raise RequestError(f"run {record.id} has no dataset in {root}: finish it first")
    ds = open_dataset(dataset_path(store, record.dataset))
    return {
        "format": FORMAT,
        "run": record.id,
        "started": record.started,
        "recipe": record.recipe,
        "base": record.base,
        "inputs": record.inputs,
        "corpus": record.corpus,
        "documents": record.documents,
        "dataset": record.dataset,
        "environment": record.environment,
        "gate": json.loads(ds.attrs["gate"]),
        "sizes": {str(name): size for name, size in ds.sizes.items()},
        "numbers": numbers(ds),
    }


def numbers(ds: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Describe every variable: SHA-256 of its type, shape and bytes; mean and extremes of what is finite."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(map(str, ds.variables)):
        values = ds[name].values
        if values.dtype.kind not in "iufb":
            spelled = json.dumps([str(value) for value in values.ravel()]).encode()
            found[name] = {"digest": _digest(values, "str", spelled)}
            continue
        values = np.ascontiguousarray(values)
        found[name] = {"digest": _digest(values, values.dtype.str, values.tobytes())}
        finite = values[np.isfinite(values)].astype(np.float64)
        if len(finite):
            found[name] |= {"mean": float(finite.mean()), "min": float(finite.min()), "max": float(finite.max())}
    return found


def _digest(values: Any, kind: str, content: bytes) -> str:
    return hashlib.sha256(f"{kind} {values.shape} ".encode() + content).hexdigest()


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A run repeated.

    Attributes:
        path: of the new dataset.
        inputs, environment: what differs from the first run.
        same: variables that are equal to the bit.
        close: others whose mean and extremes are within CLOSE.
        other: variables that are not: name, what it was, what it is now, each as `numbers` gives it.
    """

    path: Path
    inputs: list[Change]
    environment: list[Change]
    same: list[str]
    close: list[str]
    other: list[Change]


def load(path: Path) -> dict[str, Any]:
    """Read a provenance document.

    Raises:
        RequestError: unreadable, or none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or not all(isinstance(found[n], dict) for n in ("recipe", "inputs", "numbers")):
            raise ValueError(f"format {found['format']!r}, expected {FORMAT}")
        return dict(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(f"{path} is no provenance as `lenspipe export` writes it: {error}") from None


def recipe_of(provenance: dict[str, Any], store: str, settings: Sequence[str] = ()) -> Recipe:
    """Make the recipe that repeats a run.

    Args:
        provenance: as read.
        store: folder or URL of the artifacts.
        settings: changes, such as model.source=..., for what is elsewhere now.

    Raises:
        RequestError: not a valid recipe.
    """
    values = {name: dict(group) for name, group in provenance["recipe"].items()}
    place = store if is_url(store) else str(Path(store).absolute())
    values["run"] = {**values.get("run", {}), "store": place, "api": None, "address": None}
    for setting in settings:
        override(values, setting)
    return make_recipe(values, base=str(provenance.get("base", ".")), origin="the provenance")


def compare(provenance: dict[str, Any], recipe: Recipe, path: Path) -> Reproduction:
    """Compare a run repeated with the first.

    Args:
        provenance: as read.
        recipe: as made of it, and carried out.
        path: of the dataset.

    Raises:
        StoreError: the dataset or the record of its run cannot be read.
    """
    made = next((record for record in reversed(records(recipe.store)) if record.dataset == path.parent.name), None)
    if made is None:
        raise StoreError(f"no run in {recipe.store} is recorded that made {path}")
    found = numbers(open_dataset(path))
    before = provenance["numbers"]
    same = [name for name in found if name in before and found[name]["digest"] == before[name].get("digest")]
    left = [name for name in dict.fromkeys([*before, *found]) if name not in same]
    close = [name for name in left if _is_close(before.get(name, {}), found.get(name, {}))]
    other = [(name, before.get(name), found.get(name)) for name in left if name not in close]
    inputs = changes({"corpus": provenance.get("corpus")} | provenance["inputs"], {"corpus": made.corpus} | made.inputs)
    return Reproduction(path, inputs, changes(provenance.get("environment", {}), made.environment), same, close, other)


def _is_close(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    figures = ("mean", "min", "max")
    return all(isinstance(found.get(name), float) for found in (before, now) for name in figures) and all(
        math.isclose(before[name], now[name], rel_tol=CLOSE, abs_tol=CLOSE) for name in figures
    )
