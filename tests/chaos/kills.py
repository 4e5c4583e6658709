"""Kills: a small run killed at a chosen call to the file system, or at any instant, and run again.

`python -m tests.chaos.kills --kills 300` runs many and prints what became of them; `make chaos` calls it.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.plan import make_plan
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.owners import sweep
from lenspipe.upkeep import ALL_STAGES
from tests.chaos.small import carry_out, contents, small_recipe
from tests.conftest import ROOT

CHANGING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.utime"}
FAILED = 3


def in_child(work: Callable[[], Any]) -> int:
    """Start a process that does some work and ends with status 0, or FAILED where it raised."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = FAILED
        torch.set_num_threads(1)
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def ended(child: int) -> int:
    """Wait for a process: its exit status, or the negative signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def counting_changes(root: Path, at: int, then: Callable[[], None]) -> Callable[[], int]:
    """Call `then` before the change number `at` that this process makes under a folder; returns the count so far."""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (opened or event in CHANGING) and str(arguments[0]).startswith(str(root)):
            seen += 1
            if seen == at:
                then()

    sys.addaudithook(watch)
    return lambda: seen


def die() -> None:
    """End this process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@dataclass(frozen=True)
class Outcome:
    """One run killed, and run again.

    Attributes:
        killed: whether it was killed before it ended.
        stage: the stage that was next to be finished.
        whole: artifacts that were whole at that instant.
        redone: of these, how many were made again.
        same: whether the dataset is the uninterrupted run's to the bit.
        clean: whether nothing is left half made or claimed.
    """

    killed: bool
    stage: str
    whole: int
    redone: int
    same: bool
    clean: bool


def artifacts(store: ArtifactStore) -> dict[tuple[str, str], tuple[int, int]]:
    """All artifacts of a store, each checked to the last byte, and the identity of its manifest's file."""
    found = {}
    for stage in ALL_STAGES:
        for key in store.keys(stage):
            folder, _ = store.open(stage, key, checked="")
            status = (folder / "manifest.json").stat()
            found[stage, key] = (status.st_ino, status.st_mtime_ns)
    return found


def kill_and_go_on(root: Path, residuals: str, expected: dict[str, Any], at: int | None, after: float) -> Outcome:
    """Kill a run before its change number `at` of the file system, or after some seconds; then run to the end."""
    recipe, store = small_recipe(root, residuals), ArtifactStore(root)

    def run() -> None:
        if at is not None:
            counting_changes(root, at, die)
        carry_out(recipe)

    child = in_child(run)
    if at is None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    killed = ended(child)
    if killed not in (0, -signal.SIGKILL):
        raise AssertionError("the run failed by itself")
    before = artifacts(store)
    left = [stage for stage, _, todo in make_plan(recipe).counts() if todo]
    if ended(in_child(lambda: carry_out(recipe))) != 0:
        raise AssertionError("the run did not go on")
    after_all = artifacts(store)
    sweep(root)
    drafts = [path for path in (root / "drafts").rglob("*") if path.is_file()]
    leases = list((root / "leases").iterdir()) if (root / "leases").is_dir() else []
    return Outcome(
        killed=killed != 0,
        stage=left[0] if left else "none",
        whole=len(before),
        redone=sum(after_all.get(name) != identity for name, identity in before.items()),
        same=contents(make_plan(recipe).dataset_path) == expected,
        clean=not drafts and not leases and not (root / "damaged").exists(),
    )


def changes_of_a_run(root: Path, residuals: str) -> int:
    """Count the changes of the file system that one whole run makes under its store."""
    read, write = os.pipe()

    def run() -> None:
        seen = counting_changes(root, 0, die)
        carry_out(small_recipe(root, residuals))
        os.write(write, str(seen()).encode())

    assert ended(in_child(run)) == 0
    count = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    return count


def warm_up() -> None:
    """Import what every child would import anew; compute nothing, since OpenMP does not survive a fork."""
    for name in ("transformers.models.llama.modeling_llama", "lenspipe.kernels.fused"):
        import_module(name)
    load_tokenizer(ROOT / "data/tiny-model", False)


def main() -> None:
    """Kill many runs and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    choose = random.Random(asked.seed)
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        expected, counts, seconds = {}, {}, {}
        for residuals in ("keep", "stream"):
            whole = Path(folder, f"whole-{residuals}")
            began = time.monotonic()
            counts[residuals] = changes_of_a_run(whole, residuals)
            seconds[residuals] = time.monotonic() - began
            expected[residuals] = contents(make_plan(small_recipe(whole, residuals)).dataset_path)
        outcomes = []
        for n in range(asked.kills):
            residuals = choose.choice(["keep", "stream"])
            at = choose.randint(1, counts[residuals]) if n % 2 else None
            after = choose.uniform(0, seconds[residuals])
            with tempfile.TemporaryDirectory(dir=folder) as root:
                outcomes.append(kill_and_go_on(Path(root, "store"), residuals, expected[residuals], at, after))
        survived = sum(found.same and found.clean and not found.redone for found in outcomes)
        print(f"{sum(found.killed for found in outcomes)} of {len(outcomes)} runs were killed before their end")
        print(f"next to be finished: {dict(Counter(found.stage for found in outcomes if found.killed))}")
        print(f"{survived} went on to the same dataset, redid nothing that was whole, and left nothing behind")
        print(f"artifacts that were whole when a run was killed: {sum(found.whole for found in outcomes)}")
        if survived != len(outcomes):
            sys.exit(1)


if __name__ == "__main__":
    main()
