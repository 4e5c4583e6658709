"""Comparing: commands that hold runs against each other: explain, diff, export, reproduce."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lenspipe.cli.frame import RecipeFile, Settings, app, store_of
from lenspipe.cli.running import carry_out
from lenspipe.cli.tables import show, table

RunName = Annotated[str, typer.Argument(help="A run's id, or the beginning of it, or `last`.", metavar="RUN")]
Store = Annotated[
    str, typer.Option("--in", help="A store's folder or URL, or a recipe, whose store it is.", metavar="WHERE")
]
HERE = "lenspipe-store"
MOST = 20


@app.command()
def explain(recipe: RecipeFile, settings: Settings = None) -> None:
    """Say for every stage what is reused, and where not, which input changed. Loads no model."""
    from lenspipe.comparison import explain as compare  # noqa: PLC0415
    from lenspipe.plan import make_plan  # noqa: PLC0415
    from lenspipe.recipe import load_recipe  # noqa: PLC0415

    earlier, reasons = compare(make_plan(load_recipe(recipe, settings or ())))
    print(f"compared with run {earlier.id}" if earlier else "no run is recorded in this store yet")
    for reason in reasons:
        if not reason.total:
            print(f"{reason.stage}: none needed")
            continue
        print(f"{reason.stage}: {reason.total - reason.todo:,} of {reason.total:,} reused")
        for cause in reason.causes:
            print(f"  {cause}")
        _print_changes(reason.changed, "  ")


@app.command()
def diff(a: RunName, b: RunName, where: Store = HERE) -> None:
    """Compare two runs: recipes, inputs, versions, and the numbers, variable by variable."""
    from lenspipe.comparison import diff as compare  # noqa: PLC0415
    from lenspipe.history import find  # noqa: PLC0415

    root = store_of(where).root
    one, other = find(root, a), find(root, b)
    found = compare(root, one, other)
    for name, changed in (("recipe", found.recipe), ("inputs", found.inputs), ("environment", found.environment)):
        print(f"{name}: {'the same' if not changed else ''}")
        _print_changes(changed, "  ")
    if not found.numbers:
        print("numbers: not compared, since not both runs have a dataset")
        return
    shared, of_a, of_b = found.rows
    print(f"numbers: {shared:,} rows of the same documents, of {of_a:,} and {of_b:,}")
    for run, names in ((one, found.only_a), (other, found.only_b)):
        if names:
            print(f"  only in run {run.id}: {', '.join(names)}")
    if found.shapes:
        print(f"  not compared, since their lengths differ: {', '.join(found.shapes)}")
    rows = table(
        *((name, "left" if name == "variable" else "right") for name in ("variable", "values", "differ", "largest"))
    )
    for difference in found.numbers:
        largest = f"{difference.largest:.3g}" if difference.differ else "0"
        rows.add_row(difference.name, f"{difference.values:,}", f"{difference.differ:,}", largest)
    show(rows)


@app.command()
def export(
    run: RunName,
    where: Store = HERE,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; by default standard output.")] = None,
) -> None:
    """Write a run's provenance as JSON: recipe, digests, versions, gate, and digests of its numbers."""
    from lenspipe.history import find  # noqa: PLC0415
    from lenspipe.provenance import export as write_down  # noqa: PLC0415

    root = store_of(where).root
    text = json.dumps(write_down(root, find(root, run)), indent=1)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
        print(output)


@app.command()
def reproduce(
    provenance: Annotated[Path, typer.Argument(help="What `lenspipe export` wrote.", metavar="PROVENANCE")],
    settings: Settings = None,
    store: Annotated[str, typer.Option(help="Folder of the artifacts.")] = "lenspipe-store",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the outcome.")] = False,
) -> None:
    """Run again what was exported, and report the differences. Exit status 1 if numbers are not close."""
    from lenspipe.provenance import CLOSE, compare, load, recipe_of  # noqa: PLC0415

    exported = load(provenance)
    recipe = recipe_of(exported, store, settings or ())
    path = carry_out(recipe, quiet)
    found = compare(exported, recipe, path)
    for name, changed in (("inputs", found.inputs), ("environment", found.environment)):
        print(f"{name}: {'the same' if not changed else ''}")
        _print_changes(changed, "  ")
    total = len(found.same) + len(found.close) + len(found.other)
    print(f"numbers: {len(found.same)} of {total} variables are equal to the bit")
    if found.close:
        print(f"  equal in mean and extremes to {CLOSE:g}: {', '.join(found.close)}")
    for name, before, now in found.other:
        print(f"  {name}: {_spell_numbers(before)} -> {_spell_numbers(now)}")
    print(path)
    if found.other:
        sys.exit(1)


def _print_changes(changed: Sequence[tuple[str, Any, Any]], indent: str) -> None:
    for name, before, now in changed[:MOST]:
        print(f"{indent}{name}: {_short(before)} -> {_short(now)}")
    if len(changed) > MOST:
        print(f"{indent}and {len(changed) - MOST} more")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) == 64 and all(character in "0123456789abcdef" for character in text):
        return f"{text[:12]}…"
    return text if len(text) <= 100 else f"{text[:97]}…"


def _spell_numbers(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not there"
    return f"mean {found['mean']:.9g}" if "mean" in found else f"digest {found['digest'][:12]}…"
