"""Orchestration: how Prefect is asked to treat our tasks: in which batches, who carries them, which are tried again.

The artifact store decides whether a task is needed; Prefect decides when and where it runs. Prefect keeps no results of
ours: a second account of what is done, which nobody verifies, could only disagree with the first.
"""

import errno
import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.tasks import Task

from lenspipe.errors import LenspipeError, RequestError
from lenspipe.plan import Plan, Todo
from lenspipe.recipe import Run
from lenspipe.stages.work import NamedTokens
from lenspipe.storage.owners import live_owners, owner_of

MOST_TASKS = 300
"""Task runs of one stage at most: shards are batched so that a flow run stays well under 1,000."""

TRANSIENT = {errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.EINTR}
"""Errors of a store that may be gone on the next try; a full or read-only disk is not among them."""


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
        batches = [todo[i : i + size] for i in range(0, len(todo), size)]
        if batches and live_owners(self.plan.recipe.store):  # where another run is at work, begin somewhere else
            first = int(owner_of(self.plan.recipe.store).id, 16) % len(batches)
            batches = batches[first:] + batches[:first]
        for batch in batches:
            a, b = batch[0].shard.index, batch[-1].shard.index
            span = f"shard {a}" if a == b else f"shards {a}-{b}"
            awaited = [after[t.shard.index] for t in batch if after and t.shard.index in after]
            before = {id(future): future for future in awaited}
            future = self.one(stage, span, batch, list(before.values()))
            futures |= {t.shard.index: future for t in batch}
        return futures

    def one(
        self,
        stage: Task[..., str],
        span: str,
        batch: Sequence[Todo],
        after: Sequence[PrefectFuture[str]] = (),
    ) -> PrefectFuture[str]:
        """Submit one task run."""
        recipe = self.plan.recipe
        work = {
            "recipe": recipe.as_dict(),
            "base": recipe.base,
            "tasks": [t.as_dict() for t in batch],
            "stream": sorted(self.plan.stream),
            "named": self.named.as_dict(),
        }
        title = f"{stage.name} {self.plan.facts.name}, {span}"
        # As one text, so that Prefect does not walk through thousands of keys in search of futures.
        future: PrefectFuture[str] = stage.submit(title, json.dumps(work), wait_for=list(after))
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
def one_flow_run(run: Run) -> Iterator[None]:
    """Have one server for this process and its workers, and spare a flow run the second its heartbeat takes to end.

    Raises:
        LenspipeError: the Prefect server cannot be reached.
    """
    try:
        server = PREFECT_API_URL.value() or _private_server()
        # Prefect sends settings along with each task. A worker that is not told of a server starts one of its own: a
        # waste on this machine, and a need where our private one, which listens to this machine alone, is out of reach.
        shared = {} if run.address else {PREFECT_API_URL: server}
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, **shared}):
            yield
    except RuntimeError as error:
        if not str(error).startswith("Failed to reach API"):  # all by which Prefect tells it apart
            raise
        raise LenspipeError(
            f"the Prefect server cannot be reached ({error}): start it, or leave out run.api and PREFECT_API_URL to "
            "have a private one. Whatever was finished before is safe"
        ) from error


def _private_server() -> str:
    """Start the server that Prefect would start by itself, so that it ends with this process, however that ends.

    Returns:
        Its URL.
    """
    from prefect.server.api.server import SubprocessASGIServer  # noqa: PLC0415 -- takes seconds to import

    server = SubprocessASGIServer()
    if not server.running:
        threading.Thread(target=_leash, args=(server,), name="lenspipe-leash", daemon=True).start()
        server.start()
    return server.api_url


def _leash(server: Any) -> None:
    while server.server_process is None:
        time.sleep(0.01)
    # Its input ends when we do, even if we are killed.
    _leashes.append(
        subprocess.Popen(  # noqa: S603 -- nothing in it is anybody's input
            ["/bin/sh", "-c", 'read _; kill "$0"', str(server.server_process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    )


_leashes: list[subprocess.Popen[bytes]] = []
