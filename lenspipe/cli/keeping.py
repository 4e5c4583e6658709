"""Keeping: commands that look after a store: ls, status, verify, gc, prune."""

import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from lenspipe.cli.frame import RecipeFile, Settings, Where, app, say, store_of
from lenspipe.cli.tables import show, size, span, table
from lenspipe.errors import RequestError

HERE = "lenspipe-store"
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")]


@app.command()
def ls(where: Where = HERE) -> None:
    """List a store's runs, the latest last, and what its stages hold."""
    from lenspipe.history import records, state_of  # noqa: PLC0415
    from lenspipe.stages.work import dataset_path  # noqa: PLC0415
    from lenspipe.upkeep import ALL_STAGES  # noqa: PLC0415

    store = store_of(where)
    known = records(store.root)
    right = ("documents", "rows", "layers", "took", "ago", "dataset")
    rows = table(*((name, "left") for name in ("run", "state", "what")), *((name, "right") for name in right))
    for record in known:
        whole = store.is_whole("assemble", record.dataset)
        rows.add_row(
            record.id,
            state_of(store.root, record),
            record.title,
            f"{record.documents:,}",
            f"{record.rows:,}",
            str(len(record.sites)),
            span(record.seconds) if record.ended else "",
            span((datetime.now(UTC) - datetime.fromisoformat(record.started)).total_seconds()),
            size(store.size("assemble", record.dataset)) if whole else "—",
        )
    if known:
        show(rows)
    held = table(("stage", "left"), ("artifacts", "right"), ("size", "right"))
    for stage in ALL_STAGES:
        sizes = [store.size(stage, key) for key in store.keys(stage)]
        held.add_row(stage, f"{len(sizes):,}", size(sum(sizes)))
    show(held)
    if known and store.is_whole("assemble", known[-1].dataset):
        print(f"latest dataset: {dataset_path(store, known[-1].dataset)}")


@app.command()
def status(where: Where = HERE) -> None:
    """Say how far the runs in progress are, from any terminal."""
    from lenspipe.history import keys_of, records, state_of  # noqa: PLC0415
    from lenspipe.stages.work import STAGES  # noqa: PLC0415

    store = store_of(where)
    known = records(store.root)
    running = [record for record in known if state_of(store.root, record) == "running"]
    if not running:
        last = f"; the last, {known[-1].id}, {_ENDED[state_of(store.root, known[-1])]}" if known else ""
        print(f"no run is in progress in {store}{last}")
        if known and known[-1].error:
            print(known[-1].error)
        return
    for record in running:
        print(f"run {record.id}: {record.title}, since {span(record.seconds)}")
        keys, there = keys_of(store.root, record), {stage: set(store.keys(stage)) for stage in STAGES}
        rows = table(("stage", "left"), ("done", "right"), ("of", "right"), ("", "right"))
        for stage in STAGES:
            if record.todo[stage] or stage != "capture":
                done = len(there[stage].intersection(keys[stage]))
                rows.add_row(stage, f"{done:,}", f"{len(keys[stage]):,}", f"{done / len(keys[stage]):.0%}")
        show(rows)
        read = len(there["read"].intersection(keys["read"]))
        before = len(keys["read"]) - record.todo["read"]
        if before < read < len(keys["read"]):
            left = record.seconds * (len(keys["read"]) - read) / (read - before)
            print(f"about {span(left)} left to read, at the speed so far")


_ENDED = {
    "finished": "finished",
    "failed": "failed:",
    "stopped": "was stopped; run its recipe again to go on",
    "killed": "was killed; run its recipe again to go on",
}


@app.command()
def verify(
    where: Where = HERE,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, not names and sizes alone.")] = False,
) -> None:
    """Check that every artifact is what was written; set aside what is not. Exit status 1 if something was not."""
    from lenspipe.progress import counting  # noqa: PLC0415
    from lenspipe.upkeep import verify as check  # noqa: PLC0415

    store = store_of(where)
    with counting("verify", "bytes") as advance:
        found = check(store, deep, lambda _, n: advance(n))
    rows = table(("stage", "left"), ("artifacts", "right"), ("size", "right"), ("damaged", "right"))
    for stage, checked in found.items():
        rows.add_row(stage, f"{checked.artifacts:,}", size(checked.bytes), f"{len(checked.damaged):,}")
    show(rows)
    damaged = [(stage, key) for stage, checked in found.items() for key in checked.damaged]
    for stage, key in damaged:
        print(
            f"{stage} artifact {key[:12]} is not what was written: set aside; the next run that needs it makes it again"
        )
    how = "every byte" if deep else "names, sizes and manifests; --deep reads every byte"
    print(f"{len(damaged) or 'none'} damaged, by {how}")
    if damaged:
        sys.exit(1)


@app.command()
def gc(
    where: Where = HERE,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A run whose artifacts stay; may be repeated. By default all that are recorded."),
    ] = None,
    grace: Annotated[str, typer.Option(help="What is younger than this stays: 30m, 12h, 7d.")] = "1d",
    dry_run: DryRun = False,
) -> None:
    """Remove what no kept run needs, what killed runs left, and what was set aside. Never under a run in progress."""
    from lenspipe.upkeep import gc as collect  # noqa: PLC0415

    _print_removal(collect(store_of(where), keep or (), _grace(grace), dry_run), dry_run)


@app.command()
def prune(
    recipe: RecipeFile,
    settings: Settings = None,
    residuals: Annotated[bool, typer.Option("--residuals", help="Remove the recipe's residuals.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Remove what a finished recipe keeps beside its dataset."""
    from lenspipe.plan import make_plan  # noqa: PLC0415
    from lenspipe.recipe import load_recipe  # noqa: PLC0415
    from lenspipe.upkeep import prune as remove  # noqa: PLC0415

    if not residuals:
        raise RequestError("say what to remove: --residuals")
    asked = load_recipe(recipe, settings or ())
    _print_removal(remove(make_plan(asked), dry_run), dry_run)
    if asked.capture.residuals == "keep":
        say('the recipe says capture.residuals = "keep": the next run captures them again; "stream" keeps none')


def _print_removal(removal: Any, dry_run: bool) -> None:
    rows = table(("stage", "left"), ("artifacts", "right"), ("size", "right"))
    for stage in dict.fromkeys(stage for stage, *_ in removal.artifacts):
        sizes = [n for of, _, n in removal.artifacts if of == stage]
        rows.add_row(stage, f"{len(sizes):,}", size(sum(sizes)))
    if removal.artifacts:
        show(rows)
    for run in removal.runs:
        print(f"run {run} {'would go' if dry_run else 'is gone'}")
    if removal.left:
        print(f"left behind by killed runs, or set aside as damaged: {size(removal.left)}")
    if removal.recent:
        print(f"{removal.recent:,} artifacts that no run needs are younger than --grace and stay")
    print(f"{size(removal.bytes)} ({removal.bytes:,} bytes) {'would be' if dry_run else 'were'} freed")


def _grace(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,6})([smhd])", text.strip())
    if not found:
        raise RequestError(f"--grace {text!r}: write a number with s, m, h or d, such as 12h")
    unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[found[2]]
    return timedelta(**{unit: int(found[1])})
