"""Comparison: a plan with the runs before it, one run with another, one dataset with another.

Change: a name, what it was, what it is now; names of nested values are joined by dots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from lenspipe.analysis import open_dataset
from lenspipe.history import Record, keys_of, records, state_of
from lenspipe.plan import Plan
from lenspipe.stages.work import dataset_path, stage_inputs
from lenspipe.storage.artifacts import ArtifactStore

Change = tuple[str, Any, Any]
ABSENT = "(none)"


def changes(before: Any, now: Any, name: str = "") -> list[Change]:
    """List what differs between two plain values, by name."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        found = []
        for inner in dict.fromkeys([*before, *now]):
            path = f"{name}.{inner}" if name else str(inner)
            found += changes(before.get(inner, ABSENT), now.get(inner, ABSENT), path)
        return found
    return [] if before == now else [(name, before, now)]


@dataclass
class StageReason:
    """Why a stage's artifacts are to be made.

    Attributes:
        stage: its name.
        total, todo: artifacts that are needed, and that are to be made.
        changed: inputs of the stage that the earlier run had otherwise.
        causes: other causes, each in a few words.
    """

    stage: str
    total: int
    todo: int
    changed: list[Change] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)


def explain(plan: Plan) -> tuple[Record | None, list[StageReason]]:
    """Say what of a plan is reused and why the rest is not: compared with the nearest earlier run in the store.

    Returns:
        That run, or None where the store has seen none; and a reason per stage.
    """
    store = ArtifactStore(plan.recipe.store)
    now = stage_inputs(plan.recipe, plan.facts)
    earlier = _nearest(plan, records(store.root), now)
    reasons = [StageReason(stage, total, todo) for stage, total, todo in plan.counts()]
    if earlier is None:
        return None, reasons
    keys = keys_of(store.root, earlier)
    above: list[str] = []
    for reason in reasons:
        if not reason.todo:
            continue
        stage = reason.stage
        reason.changed = changes(earlier.inputs.get(stage, {}), now[stage])
        if above:
            reason.causes.append(f"rests on {' and '.join(above)}, which changed")
        reason.causes += _of_shards(plan, stage, keys["contents"]) + _of_cells(plan, earlier, stage)
        needed, had = _needed(plan, stage), set(keys[stage])
        gone = [key for key in needed if key in had and store.missing_or_damaged(stage, key) == "missing"]
        if gone:
            ended = state_of(store.root, earlier)
            why = "are no longer there" if ended == "finished" else f"were not made before it {_ENDED[ended]}"
            reason.causes.append(f"{len(gone):,} that run {earlier.id} needed {why}")
        if damaged := [name for name in plan.damaged if name.startswith(f"{stage} ")]:
            reason.causes.append(f"{len(damaged):,} are damaged")
        if reason.changed or _of_shards(plan, stage, keys["contents"]):
            above.append(stage)
    return earlier, reasons


_ENDED = {
    "killed": "was killed",
    "stopped": "was stopped",
    "failed": "failed",
    "running": "came to them: it is running",
}


def _nearest(plan: Plan, known: Sequence[Record], now: Mapping[str, Any]) -> Record | None:
    """The run that differs in the fewest things from this plan, the latest of these."""
    asked = plan.recipe.as_dict()

    def distance(record: Record) -> int:
        return 10 * len(changes(record.inputs, now)) + len(changes(record.recipe, asked))

    return min(reversed(known), key=distance, default=None)


def _of_shards(plan: Plan, stage: str, contents: Sequence[str]) -> list[str]:
    known = set(contents)
    new = sum(shard.contents not in known for shard in plan.shards)
    if not new or stage == "assemble":
        return []
    return [f"{new:,} of {len(plan.shards):,} shards hold documents that are new, changed or cut otherwise"]


def _of_cells(plan: Plan, earlier: Record, stage: str) -> list[str]:
    if stage not in ("capture", "read"):
        return []
    new = [site.name for site in plan.sites if site.name not in earlier.sites]
    return [f"{len(new)} sites are new: {', '.join(new[:6])}{' ...' if len(new) > 6 else ''}"] if new else []


def _needed(plan: Plan, stage: str) -> list[str]:
    if stage == "assemble":
        return [plan.dataset] if plan.assemble else []
    return [key for task in getattr(plan, stage) for _, key in task.artifacts(stage)]


@dataclass
class Difference:
    """One variable of two datasets.

    Attributes:
        name: of the variable.
        values: how many were compared.
        differ: how many of these are not equal; NaN equals NaN.
        largest: the largest absolute difference of numbers; 0 where all are equal, NaN where a NaN meets a number.
    """

    name: str
    values: int
    differ: int
    largest: float


@dataclass
class RunDifference:
    """Two runs.

    Attributes:
        recipe, inputs, environment: what differs.
        only_a, only_b: variables that one dataset alone has.
        shapes: variables that cannot be compared, since they have other lengths.
        rows: how many rows of the datasets are of the same documents, and of how many in each.
        numbers: per variable that both have, at the layers and rows that both have.
    """

    recipe: list[Change]
    inputs: list[Change]
    environment: list[Change]
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    rows: tuple[int, int, int] = (0, 0, 0)
    numbers: list[Difference] = field(default_factory=list)


def diff(root: Path, a: Record, b: Record) -> RunDifference:
    """Compare two runs of a store: what was asked, what it rests on, and, where both have datasets, the numbers.

    Raises:
        StoreError: a dataset cannot be read.
    """
    found = RunDifference(
        changes(a.recipe, b.recipe), changes(a.inputs, b.inputs), changes(a.environment, b.environment)
    )
    store = ArtifactStore(root)
    if store.is_whole("assemble", a.dataset) and store.is_whole("assemble", b.dataset):
        one, other = (open_dataset(dataset_path(store, run.dataset)) for run in (a, b))
        compare_datasets(one, other, found)
    return found


def compare_datasets(a: xr.Dataset, b: xr.Dataset, into: RunDifference) -> None:
    """Compare the numbers of two datasets at the layers, and in the documents, that both have."""
    into.only_a = sorted(str(name) for name in a.data_vars if name not in b)
    into.only_b = sorted(str(name) for name in b.data_vars if name not in a)
    rows = _same_rows(a, b)
    into.rows = len(rows[0]), a.sizes["token"], b.sizes["token"]
    layers = [site for site in a["site"].values if site in b["site"].values]
    k = min(ds.sizes.get("k", 0) for ds in (a, b))
    for name in (str(name) for name in a.data_vars if name in b):
        pair = [_aligned(ds[name], at, layers, k) for ds, at in zip((a, b), rows, strict=True)]
        if pair[0].shape == pair[1].shape:
            into.numbers.append(_difference(name, *pair))
        else:
            into.shapes.append(name)


def _same_rows(a: xr.Dataset, b: xr.Dataset) -> tuple[Any, Any]:
    """Rows of the documents that both have: those with the same ids at the same positions."""

    def documents(ds: xr.Dataset) -> dict[bytes, Any]:
        number = ds["document_length"].values
        starts = np.concatenate([[0], np.cumsum(number)])
        spelled = np.stack([ds[name].values for name in ("input_id", "position", "sequence")], axis=1)
        ends = [(starts[j], starts[j + 1]) for j in range(len(number)) if number[j]]
        return {spelled[start:stop].tobytes(): np.arange(start, stop) for start, stop in ends}

    of_a, of_b = documents(a), documents(b)
    shared = [document for document in of_a if document in of_b]
    none = [np.empty(0, np.int64)]
    return tuple(np.concatenate([found[document] for document in shared] or none) for found in (of_a, of_b))  # type: ignore[return-value]


def _aligned(variable: xr.DataArray, rows: Any, layers: Sequence[Any], k: int) -> Any:
    if "layer" in variable.dims:
        site = variable["site"].values.tolist()
        variable = variable.isel(layer=[site.index(name) for name in layers])
    if "token" in variable.dims:
        variable = variable.isel(token=rows)
    if "k" in variable.dims:
        variable = variable.isel(k=slice(k))
    return variable.values


def _difference(name: str, a: Any, b: Any) -> Difference:
    if a.dtype.kind not in "iufb" or b.dtype.kind not in "iufb":
        return Difference(name, a.size, int((a != b).sum()), float("nan") if (a != b).any() else 0.0)
    x, y = a.astype(np.float64), b.astype(np.float64)
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    largest = float(np.abs(x - y)[~equal].max()) if not equal.all() else 0.0
    return Difference(name, x.size, int((~equal).sum()), largest)
