"""Upkeep: looking after a store: what is in it, whether it is what was written, and what may go.

Reach: the artifacts that the recorded runs need. Nothing here computes a result.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from lenspipe.errors import RequestError, StoreError
from lenspipe.history import REMOVAL, find, forget, keys_of, records, state_of
from lenspipe.plan import CUT, Plan
from lenspipe.stages.work import SAMPLE, STAGES
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.owners import held_leases, leases, sweep

ALL_STAGES = (CUT, SAMPLE, *STAGES)


@dataclass
class Checked:
    """What a check of one stage has found.

    Attributes:
        artifacts, bytes: that were there.
        damaged: keys of those that are not what was written.
    """

    artifacts: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)


def verify(
    store: ArtifactStore, deep: bool = False, on_artifact: Callable[[str, int], None] = lambda *_: None
) -> dict[str, Checked]:
    """Compare every artifact with its manifest, and set aside what is not what was written.

    Args:
        store: to be checked.
        deep: read every byte and compare checksums; otherwise names and sizes, and the manifests themselves.
        on_artifact: told (stage, bytes) of each artifact.

    Returns:
        Per stage, what was found.
    """
    found = {stage: Checked() for stage in ALL_STAGES}
    for stage, checked in found.items():
        for key in list(store.keys(stage)):
            size = store.size(stage, key)
            checked.artifacts += 1
            checked.bytes += size
            if store.is_damaged(stage, key, deep):
                store.set_aside(stage, key)
                checked.damaged.append(key)
                if store.is_damaged(stage, key, deep):  # behind the folder too
                    store.set_aside(stage, key)
            on_artifact(stage, size)
    return found


@dataclass
class Removal:
    """What may go from a store.

    Attributes:
        artifacts: (stage, key, bytes).
        runs: ids of runs whose records go.
        left: bytes of what was left behind: drafts of dead owners, and damaged artifacts that were set aside.
        recent: artifacts that nothing reaches and that are younger than the grace period.
    """

    artifacts: list[tuple[str, str, int]] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    left: int = 0
    recent: int = 0

    @property
    def bytes(self) -> int:
        """All that it frees."""
        return sum(size for *_, size in self.artifacts) + self.left


def gc(
    store: ArtifactStore, keep: Sequence[str] = (), grace: timedelta = timedelta(days=1), dry: bool = False
) -> Removal:
    """Remove what no kept run needs.

    Args:
        store: to be cleared.
        keep: runs whose artifacts stay, by id or its beginning; all that are recorded if empty.
        grace: artifacts younger than this stay, whoever needs them.
        dry: remove nothing.

    Raises:
        RequestError: no such run, or none is recorded at all.
        StoreError: another process is at work in the store; nothing is removed.
    """
    known = records(store.root)
    if not known:
        raise RequestError(f"no run is recorded in {store}, so everything would go: run its recipes first")
    kept = [find(store.root, name) for name in keep] or known
    reached: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for record in kept:
        keys = keys_of(store.root, record)
        for stage in STAGES:
            reached[stage].update(keys[stage])
    ids = {record.id for record in kept}
    removal = Removal(runs=[record.id for record in known if record.id not in ids])
    youngest = datetime.now(UTC) - grace
    for stage in STAGES:
        for key in store.keys(stage):
            if key in reached[stage]:
                continue
            if store.created(stage, key) > youngest:
                removal.recent += 1
            else:
                removal.artifacts.append((stage, key, store.size(stage, key)))
    aside = store.root / "damaged"
    removal.left = sum(path.lstat().st_size for path in aside.rglob("*") if not path.is_dir())
    removal.left += sum(store.remote.sizes("damaged").values()) if store.remote else 0
    if not dry:
        with _alone(store):
            _remove(store, removal)
            for run in removal.runs:
                forget(store.root, run)
            shutil.rmtree(aside, ignore_errors=True)
            if store.remote:
                store.remote.delete(*store.remote.sizes("damaged"))
    return removal


def prune(plan: Plan, dry: bool = False) -> Removal:
    """Remove a recipe's residuals, once all that is read from them has been read.

    Raises:
        RequestError: something is not read yet.
        StoreError: another process is at work in the store.
    """
    if plan.read or plan.assemble:
        raise RequestError(
            "the recipe's run is not finished, and what is left to read needs its residuals: run it first"
        )
    store = ArtifactStore(plan.recipe.store)
    held = set(store.keys("capture"))
    there = [key for stage, key in plan.artifacts() if stage == "capture" and key in held]
    removal = Removal([("capture", key, store.size("capture", key)) for key in there])
    if not dry:
        with _alone(store):
            _remove(store, removal)
    return removal


def _remove(store: ArtifactStore, removal: Removal) -> None:
    for stage, key, _ in removal.artifacts:
        store.remove(stage, key)
    removal.left += sweep(store.root)


@contextmanager
def _alone(store: ArtifactStore) -> Iterator[None]:
    """Keep runs from beginning.

    Raises:
        StoreError: one is at work already.
    """
    with leases(store.root, [REMOVAL]) as mine:
        running = [record.id for record in records(store.root) if state_of(store.root, record) == "running"]
        if running or not mine or held_leases(store.root):
            who = f"run {running[0]}" if running else "another process"
            raise StoreError(f"{who} is at work in {store}: nothing was removed; wait for its end")
        yield
