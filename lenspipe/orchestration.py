"""Orchestration: how Prefect is asked to treat our tasks: when a record counts, who may write, who carries, how quiet.

The artifact store decides whether a task is needed; Prefect decides when and where it runs. A task's record lies inside
the last of its artifacts, so that it disappears with it, and counts only while all of its artifacts are whole.
"""

import asyncio
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.tasks import Task

from lenspipe.errors import LenspipeError, RequestError
from lenspipe.plan import Plan, Todo
from lenspipe.recipe import Run
from lenspipe.stages.work import NamedTokens
from lenspipe.storage.artifacts import RECORD, ArtifactStore

MOST_TASKS = 300
"""Task runs of one stage at most: shards are batched so that a flow run stays well under 1,000."""

TRANSIENT = {errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.EINTR}
"""Errors of a store that may be gone on the next try; a full or read-only disk is not among them."""


@dataclass
class ContentKey(CachePolicy):
    """Names a task's record after its artifacts: those in its parameter `work`, a JSON text."""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        """Name the record, and drop it if an artifact that it vouches for is not whole."""
        work: Mapping[str, Any] = json.loads(inputs["work"])
        store = ArtifactStore(Path(work["store"]))
        names = [(str(stage), str(key)) for stage, key in work["artifacts"]]
        stage, key = names[-1]
        spelled = hashlib.sha256(repr(names).encode()).hexdigest()[:16]
        record = store.path(stage, key) / f"{RECORD}-{spelled}"
        if not all(store.is_whole(*name) for name in names):
            record.unlink(missing_ok=True)
        return record.relative_to(store.root).as_posix()


@dataclass
class FileLocks:
    """Locks that the kernel frees when their owner dies, by flock on one file per key.

    Across hosts a flock may not hold; then two hosts may do one piece of work, and publishing still keeps it right.
    """

    folder: Path
    _held: dict[str, tuple[str, int]] = field(default_factory=dict)
    _guard: Any = field(default_factory=Lock)

    def acquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """Take the lock, waiting up to acquire_timeout seconds (for ever if None)."""
        if self.is_lock_holder(key, holder):
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path(key), os.O_RDWR | os.O_CREAT, 0o644)
        deadline = None if acquire_timeout is None else time.monotonic() + acquire_timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline is not None and time.monotonic() >= deadline:
                    os.close(handle)
                    return False
                time.sleep(0.05)
        with self._guard:
            self._held[key] = (holder, handle)
        return True

    async def aacquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """Take the lock without blocking the event loop."""
        return await asyncio.to_thread(self.acquire_lock, key, holder, acquire_timeout, hold_timeout)

    def release_lock(self, key: str, holder: str) -> None:
        """Free the lock; its file stays, since removing it would race."""
        with self._guard:
            owner, handle = self._held.get(key, (None, -1))
            if owner != holder:
                raise ValueError(f"{holder} does not hold the lock of {key}")
            del self._held[key]
        os.close(handle)

    def is_locked(self, key: str) -> bool:
        """Tell whether anybody holds the lock."""
        return not self.wait_for_lock(key, timeout=0)

    def is_lock_holder(self, key: str, holder: str) -> bool:
        """Tell whether this holder, in this process, holds the lock."""
        with self._guard:
            return self._held.get(key, (None, -1))[0] == holder

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Wait until nobody holds the lock; False if that took longer than timeout seconds."""
        waiter = f"waiter-{time.monotonic_ns()}"
        if not self.acquire_lock(key, waiter, acquire_timeout=timeout):
            return False
        self.release_lock(key, waiter)
        return True

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Wait without blocking the event loop."""
        return await asyncio.to_thread(self.wait_for_lock, key, timeout)

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.lock"

    def __deepcopy__(self, memo: Any) -> "FileLocks":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # locks of another process start with nothing held


class Handed:
    """A plan handed to a flow in the same process: Prefect records nothing of it, and sends none of it to workers."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()


Futures = dict[int, PrefectFuture[str]]
"""Per shard index, the future of the task that does it."""


@dataclass(frozen=True)
class Sender:
    """Submits what a plan left to do, as task runs of whole batches.

    Attributes:
        plan: what to do.
        named: tokens that the recipe names.
    """

    plan: Plan
    named: NamedTokens

    def batches(
        self, stage: Task[..., str], todo: Sequence[Todo], most: int = MOST_TASKS, after: Futures | None = None
    ) -> Futures:
        """Submit one stage's missing work in batches of consecutive shards.

        Args:
            stage: the Prefect task.
            todo: what is missing.
            most: task runs at most.
            after: what each shard has to wait for.
        """
        size = -(-len(todo) // most) or 1
        futures: Futures = {}
        for batch in (todo[i : i + size] for i in range(0, len(todo), size)):
            first, last = batch[0].shard.index, batch[-1].shard.index
            span = f"shard {first}" if first == last else f"shards {first}-{last}"
            awaited = [after[t.shard.index] for t in batch if after and t.shard.index in after]
            before = {id(future): future for future in awaited}
            artifacts = [name for t in batch for name in t.artifacts(stage.name)]
            future = self.one(stage, span, batch, artifacts, list(before.values()))
            futures |= {t.shard.index: future for t in batch}
        return futures

    def one(
        self,
        stage: Task[..., str],
        span: str,
        batch: Sequence[Todo],
        artifacts: Sequence[tuple[str, str]],
        after: Sequence[PrefectFuture[str]] = (),
    ) -> PrefectFuture[str]:
        """Submit one task run, which makes `artifacts`."""
        recipe = self.plan.recipe
        work = {
            "store": str(recipe.store),
            "recipe": recipe.as_dict(),
            "base": recipe.base,
            "artifacts": artifacts,
            "tasks": [t.as_dict() for t in batch],
            "stream": sorted(self.plan.stream),
            "named": self.named.as_dict(),
        }
        policy = ContentKey().configure(isolation_level="SERIALIZABLE", lock_manager=FileLocks(recipe.store / "locks"))
        configured = stage.with_options(cache_policy=policy, result_storage=recipe.store)
        title = f"{stage.name} {self.plan.facts.name}, {span}"
        # As one text, so that Prefect does not walk through thousands of keys in search of futures.
        future: PrefectFuture[str] = configured.submit(title, json.dumps(work), wait_for=list(after))
        return future


def wait(*stages: Futures) -> None:
    """Wait for all tasks; then raise the error of the first that failed, in the order of the stages."""
    futures = {id(future): future for stage in stages for future in stage.values()}
    for future in futures.values():
        future.wait()
    for future in futures.values():
        future.result()


def is_transient(_task: Any, _run: Any, state: Any) -> bool:
    """Tell Prefect whether a failed task may be tried again: only where a second try can differ."""
    try:
        state.result()
    except LenspipeError as error:
        return isinstance(error.__cause__, OSError) and error.__cause__.errno in TRANSIENT
    except OSError as error:
        return error.errno in TRANSIENT
    except Exception:
        return False
    return False


def task_runner(run: Run) -> TaskRunner[Any]:
    """Choose what carries the tasks.

    Raises:
        RequestError: the runner's package is not installed.
    """
    if run.runner == "threads":
        return ThreadPoolTaskRunner(max_workers=run.workers)
    try:
        if run.runner == "dask":
            from prefect_dask import DaskTaskRunner  # noqa: PLC0415 -- an optional extra

            local = {"n_workers": run.workers, "threads_per_worker": 1, "dashboard_address": None}
            return DaskTaskRunner(address=run.address) if run.address else DaskTaskRunner(cluster_kwargs=local)
        from prefect_ray import RayTaskRunner  # noqa: PLC0415 -- an optional extra

        quiet = {"num_cpus": run.workers, "include_dashboard": False, "log_to_driver": False}
        ray: TaskRunner[Any] = RayTaskRunner(**({"address": run.address} if run.address else {"init_kwargs": quiet}))
        return ray
    except ImportError as error:
        raise RequestError(
            f'run.runner is "{run.runner}": install it with pip install "lenspipe[{run.runner}]"'
        ) from error


@contextmanager
def one_flow_run() -> Iterator[None]:
    """Spare a flow run the second that its heartbeat thread takes to end.

    Raises:
        LenspipeError: the Prefect server cannot be reached.
    """
    try:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield
    except RuntimeError as error:
        if not str(error).startswith("Failed to reach API"):  # all by which Prefect tells it apart
            raise
        raise LenspipeError(
            f"the Prefect server cannot be reached ({error}): start it, or leave out run.api and PREFECT_API_URL to "
            "have a private one. Whatever was finished before is safe"
        ) from error
