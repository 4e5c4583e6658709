"""History: the runs that a store has seen: what each was asked, what it rests on, how it ended.

Layout: ROOT/runs/ID/record.json, and keys.json beside it with the keys of all that the run needs. A record is written
when work begins and again when it ends; of a run that was killed, the first stays, and its owner is dead.
This module computes nothing of a run's results.
"""

import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from lenspipe.errors import RequestError, StoreError, redacted
from lenspipe.plan import Plan
from lenspipe.stages.work import STAGES, stage_inputs
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.disk import write_through
from lenspipe.storage.owners import is_alive, is_leased, owner_of
from lenspipe.storage.remote import remote_behind

RECORD, KEYS = "record.json", "keys.json"
REMOVAL = "removal"
"""Lease of whoever removes artifacts; no run begins under it."""
PACKAGES = ("lenspipe", "torch", "transformers", "tokenizers", "numpy", "numba", "zarr", "xarray", "prefect")

State = Literal["running", "killed", "stopped", "failed", "finished"]


@dataclass(frozen=True, slots=True)
class Record:
    """One run.

    Attributes:
        id: its name in the store.
        state: as written; `state_of` tells a running one from one that was killed.
        owner: of the process that began it.
        title: the model and the corpus, in short.
        started, ended: ISO 8601, UTC; ended is empty until it does.
        recipe, base: what was asked, and the folder that its paths start from.
        inputs: per stage, all that decides its results but the documents.
        corpus: digest of the documents' texts.
        documents, shards, rows: how many; rows may be an estimate.
        sites: names, in order of depth.
        todo: per stage, artifacts that were to be made.
        work: cells times rows that were to be read.
        dataset: its key.
        environment: versions of packages, and of the machine.
        error: what it failed with.
    """

    id: str
    state: State
    owner: str
    title: str
    started: str
    ended: str
    recipe: dict[str, Any]
    base: str
    inputs: dict[str, dict[str, Any]]
    corpus: str
    documents: int
    shards: int
    rows: int
    sites: list[str]
    todo: dict[str, int]
    work: int
    dataset: str
    environment: dict[str, str]
    error: str = ""

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        end = datetime.fromisoformat(self.ended) if self.ended else datetime.now(UTC)
        return (end - datetime.fromisoformat(self.started)).total_seconds()


_RECORD = TypeAdapter(Record)


@contextmanager
def recorded(plan: Plan) -> Iterator[None]:
    """Record a run while its block carries it out."""
    record = _begin(plan)
    try:
        yield
    except KeyboardInterrupt:
        _end(plan, record, "stopped")
        raise
    except BaseException as error:
        _end(plan, record, "failed", f"{type(error).__name__}: {error}")
        raise
    _end(plan, record, "finished")


def record_if_unknown(plan: Plan) -> None:
    """Record a run that found everything done, if no run of the store is recorded that needs the same."""
    if not any(record.dataset == plan.dataset for record in records(plan.recipe.store)):
        with suppress(StoreError, OSError):  # a store that is read-only
            _end(plan, _begin(plan), "finished")


def _begin(plan: Plan) -> Record:
    now, root = datetime.now(UTC), plan.recipe.store
    record = Record(
        id=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}",
        state="running",
        owner=owner_of(root).id,
        title=plan.title,
        started=now.isoformat(timespec="milliseconds"),
        ended="",
        recipe=plan.recipe.as_dict(),
        base=plan.recipe.base,
        inputs=stage_inputs(plan.recipe, plan.facts),
        corpus=plan.corpus,
        documents=plan.shards[-1].stop,
        shards=len(plan.shards),
        rows=plan.n_rows(),
        sites=[site.name for site in plan.sites],
        todo={stage: todo for stage, _, todo in plan.counts()},
        work=plan.work(),
        dataset=plan.dataset,
        environment=environment(),
    )
    write_through(root, f"runs/{record.id}/{KEYS}", json.dumps(_keys(plan)))
    _write(root, record)
    while is_leased(root, REMOVAL):  # what it removes is what no run needed that had begun before
        time.sleep(0.2)
    return record


def _end(plan: Plan, record: Record, state: State, error: str = "") -> None:
    ended = datetime.now(UTC).isoformat(timespec="milliseconds")
    with suppress(StoreError):  # a disk that is full, a service that is gone; the run itself says so
        made = ArtifactStore(plan.recipe.store).manifest("assemble", plan.dataset)
        rows = int(made.attributes.get("rows", record.rows)) if made else record.rows
        _write(plan.recipe.store, replace(record, state=state, ended=ended, rows=rows, error=redacted(error)))


def _write(root: Path, record: Record) -> None:
    write_through(root, f"runs/{record.id}/{RECORD}", json.dumps(asdict(record), indent=1))


def _keys(plan: Plan) -> dict[str, Any]:
    keys: dict[str, Any] = {stage: [] for stage in STAGES}
    for stage, key in plan.artifacts():
        keys[stage].append(key)
    return keys | {"contents": [shard.contents for shard in plan.shards]}


def environment() -> dict[str, str]:
    """Name what may matter to a number, or to how long it took."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())}


def records(root: Path) -> list[Record]:
    """List the runs of a store, the latest last; what cannot be read as a record is passed over."""
    found = []
    _fetch(root)
    for path in sorted((root / "runs").glob(f"*/{RECORD}")):
        with suppress(OSError, ValueError, TypeError, RecursionError):
            record = _RECORD.validate_json(path.read_bytes())
            ended = datetime.fromisoformat(record.ended or record.started)
            if record.id == path.parent.name and ended >= datetime.fromisoformat(record.started):
                found.append(record)
    return sorted(found, key=lambda record: (record.started, record.id))


def _fetch(root: Path) -> None:
    """Copy records from behind the folder into it, and those of running ones again."""
    if (remote := remote_behind(root)) is None:
        return
    sizes = remote.sizes("runs")
    stale = [
        name for name, size in sizes.items() if not (root / name).is_file() or (root / name).stat().st_size != size
    ]
    remote.download("", [name for name in stale if ".." not in name.split("/")], root)
    for path in (root / "runs").glob(f"*/{RECORD}"):
        if path.relative_to(root).as_posix() not in sizes:  # removed elsewhere
            shutil.rmtree(path.parent, ignore_errors=True)


def forget(root: Path, name: str) -> None:
    """Remove the record of a run."""
    if remote := remote_behind(root):
        remote.delete(*remote.sizes(f"runs/{name}"))
    shutil.rmtree(root / "runs" / name, ignore_errors=True)


def find(root: Path, name: str) -> Record:
    """Find a run by its id or the beginning of it, or `last`.

    Raises:
        RequestError: none, or several.
    """
    known = records(root)
    found = known[-1:] if name == "last" else [record for record in known if record.id.startswith(name)]
    if len(found) != 1:
        ids = ", ".join(record.id for record in (found or known)[-5:]) or "none"
        raise RequestError(f"{len(found) or 'no'} runs of {root} begin with {name!r}; known are {ids}")
    return found[0]


def keys_of(root: Path, record: Record) -> Mapping[str, list[str]]:
    """Read the keys of all that a run needs: stage -> keys; and `contents`, digests of its shards' texts.

    Raises:
        StoreError: they cannot be read.
    """
    path = root / "runs" / record.id / KEYS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: [str(key) for key in found[name]] for name in ("contents", *STAGES)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"cannot read {path}: {error}") from None


def seconds_expected(plan: Plan) -> tuple[float, str] | None:
    """Estimate how long a plan takes from the latest finished run that read the same model's states; with its id."""
    model = stage_inputs(plan.recipe, plan.facts)["capture"]["model"]
    for record in reversed(records(plan.recipe.store)):
        if record.state == "finished" and record.work and record.inputs.get("capture", {}).get("model") == model:
            return plan.work() * record.seconds / record.work, record.id
    return None


def state_of(root: Path, record: Record) -> State:
    """How a run stands now."""
    return "killed" if record.state == "running" and not is_alive(root, record.owner) else record.state
