"""Running: commands that plan and carry out: plan, run, lens, validate-lens."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lenspipe.cli.frame import RecipeFile, Settings, app, say
from lenspipe.cli.tables import lenses_of, print_frame, show, span, table
from lenspipe.errors import LenspipeError, RequestError

if TYPE_CHECKING:
    from lenspipe.plan import Plan
    from lenspipe.recipe import Recipe


@app.command()
def plan(recipe: RecipeFile, settings: Settings = None) -> None:
    """Say what a recipe needs, what of it exists, and what would be done. Loads no model."""
    from lenspipe.plan import make_plan, require_room  # noqa: PLC0415
    from lenspipe.recipe import load_recipe  # noqa: PLC0415

    found = make_plan(load_recipe(recipe, settings or ()))
    _print_plan(found, stderr=False)
    try:
        require_room(found)
    except LenspipeError as error:
        print(f"would be refused: {error}")


@app.command()
def run(
    recipe: RecipeFile,
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the dataset's path.")] = False,
) -> None:
    """Do what a recipe asks for and is not there yet. The last line of standard output is the dataset's path."""
    from lenspipe.recipe import load_recipe  # noqa: PLC0415

    print(carry_out(load_recipe(recipe, settings or ()), quiet))


def carry_out(recipe: "Recipe", quiet: bool) -> Path:
    """Carry a recipe out, with progress on the terminal; returns the dataset's path."""
    from lenspipe.progress import Progress  # noqa: PLC0415
    from lenspipe.runs import run as do  # noqa: PLC0415

    with Progress(quiet) as progress:

        def on_plan(found: "Plan") -> None:
            if not quiet:
                _print_plan(found, stderr=True)
            progress.begin(found)

        try:
            return do(recipe, lambda line: None if quiet else say(line), on_plan, progress.advance)
        except KeyboardInterrupt:
            progress.close()
            say("stopped; every finished cell is safe: run the same command again to go on")
            raise typer.Exit(130) from None


@app.command("lens")
def lens_command(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A hub id, a local folder, or a GGUF file.")],
    revision: Annotated[str | None, typer.Option(help="The hub's branch, tag or commit.")] = None,
    top_k: Annotated[int, typer.Option(help="How many tokens to show a layer.", min=1)] = 5,
    position: Annotated[int, typer.Option(help="Position to read; -1 is the last.")] = -1,
    dtype: Annotated[str, typer.Option(help="What the model computes in.")] = "auto",
    lens: Annotated[
        list[str] | None,
        typer.Option(help="logit, or a lens file; may be repeated. What it has no map for is read plainly."),
    ] = None,
) -> None:
    """Read one prompt: what the model would say next, layer by layer. No recipe, nothing stored."""
    from lenspipe.models.lens_model import LensModel  # noqa: PLC0415
    from lenspipe.prompts import logit_lens  # noqa: PLC0415

    opened = LensModel.load(model, revision=revision, dtype=dtype)
    ids = opened.to_tokens(text)
    if not -len(ids) <= position < len(ids):
        raise RequestError(
            f"position {position}: the prompt has {len(ids)} tokens, so positions go from 0 to {len(ids) - 1}"
        )
    read_with = lens or ["logit"]
    measures = ["topk", "logsumexp", "entropy", "kl_final"]
    top_k = min(top_k, opened.facts.vocab_size)
    ds = logit_lens(opened, ids, lens=read_with, uncovered="logit", top_k=top_k, measures=measures)
    at = position % len(ids)
    print(f"{opened.facts.name} after {opened.to_string(ids[: at + 1])!r} (position {at} of {len(ids)} tokens)")
    for part in lenses_of(ds):
        _print_reading(part.isel(token=at))


@app.command("validate-lens")
def validate_lens_command(
    recipe: RecipeFile,
    settings: Settings = None,
    documents: Annotated[int, typer.Option(help="How many documents of the corpus to read.", min=1)] = 16,
) -> None:
    """Score a recipe's lenses: how far, in nats, each layer's prediction is from the last. Nothing is stored."""
    from lenspipe.recipe import load_recipe  # noqa: PLC0415
    from lenspipe.validation import validate_lens  # noqa: PLC0415

    scores = validate_lens(load_recipe(recipe, settings or ()), documents)
    for name in scores.columns[1:]:
        better, mapped = int((scores[name] < scores["logit"]).sum()), int(scores[name].notna().sum())
        print(f"{name}: nearer to the last layer than the logit lens at {better} of the {mapped} layers it covers")
    print_frame(scores, dict.fromkeys(scores.columns, ".4f"))


def _print_plan(found: "Plan", stderr: bool) -> None:
    from lenspipe.history import seconds_expected  # noqa: PLC0415

    rows = table(("stage", "left"), ("artifacts", "right"), ("reused", "right"), ("to do", "right"))
    for stage, total, todo in found.counts():
        rows.add_row(stage, f"{total:,}", f"{total - todo:,}", f"{todo:,}")
    write = print if not stderr else say
    exact = "" if len(found.tokens) == len(found.shards) else "about "
    documents = found.shards[-1].stop
    write(
        f"{found.facts.name}: {documents:,} documents, {exact}{found.n_tokens():,} tokens, "
        f"{len(found.shards):,} shards, {len(found.sites)} sites"
    )
    show(rows, stderr)
    if found.is_done:
        write(f"everything is cached; nothing to do\ndataset {found.dataset_path}")
    else:
        model = "" if found.loads_model else "; no model needed"
        size = found.bytes_to_write() / 2**20
        write(f"to write: at most about {size:,.1f} MiB in {found.files_to_write():,} files{model}")
        if found.read and (expected := seconds_expected(found)):
            write(f"to take: about {span(expected[0])}, at the speed of run {expected[1]}")
    for name in found.damaged:
        if not stderr:
            write(f"artifact {name} is damaged and would be redone")


def _print_reading(ds: Any) -> None:
    from rich.text import Text  # noqa: PLC0415

    if str(ds["lens"].values) != "logit":
        print(f"lens {ds['lens'].values}")
    best = [(f"{i + 1}.", "left") for i in range(ds.sizes["k"])]
    rows = table(("layer", "right"), ("entropy", "right"), ("KL to last", "right"), *best)
    probabilities = _exp(ds["topk_logit"].values - ds["logsumexp"].values[:, None])
    words = ds["vocab_token"].values[ds["topk_id"].values]
    for i in reversed(range(ds.sizes["layer"])):
        row = ds.isel(layer=i)
        cells = [f"{str(word)!r} {p:.1%}" for word, p in zip(words[i], probabilities[i], strict=True)]
        numbers = f"{float(row['layer']):g}", f"{float(row['entropy']):.2f}", f"{float(row['kl_final']):.2f}"
        rows.add_row(*numbers, *map(Text, cells))
    show(rows)


def _exp(values: Any) -> Any:
    import numpy as np  # noqa: PLC0415

    return np.exp(values)
