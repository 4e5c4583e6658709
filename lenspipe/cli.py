"""Command line: `lenspipe plan | run | show | plot | lens | validate-lens`.

Results go to standard output, everything said on the way to standard error. Exit status 0: done; 1: the run failed;
2: the request was wrong. Heavy libraries are imported by the command that needs them.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lenspipe.errors import LenspipeError, ModelError, RequestError

if TYPE_CHECKING:
    from lenspipe.plan import Plan

app = typer.Typer(
    help="The logit lens at corpus scale: from text to one labelled xarray dataset.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="RECIPE")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, such as read.top_k=20; may be repeated.")
]
DatasetPath = Annotated[Path, typer.Argument(help="The dataset, as printed by `lenspipe run`.", metavar="DATASET")]


def main() -> None:
    """Run the command line, turning errors into messages and exit statuses."""
    try:
        app()
    except LenspipeError as error:
        _say(f"error: {error}")
        sys.exit(2 if isinstance(error, RequestError | ModelError) else 1)
    except KeyboardInterrupt:
        _say("stopped; every finished cell is safe: run the same command again to go on")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)


@app.command()
def plan(recipe: RecipeFile, settings: Settings = None) -> None:
    """Say what a recipe needs, what of it exists, and what would be done. Loads no model."""
    from lenspipe.plan import make_plan  # noqa: PLC0415
    from lenspipe.recipe import load_recipe  # noqa: PLC0415

    found = make_plan(load_recipe(recipe, settings or ()))
    _print_plan(found, stderr=False)


@app.command()
def run(
    recipe: RecipeFile,
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the dataset's path.")] = False,
) -> None:
    """Do what a recipe asks for and is not there yet. The last line of standard output is the dataset's path."""
    from lenspipe.progress import Progress  # noqa: PLC0415
    from lenspipe.recipe import load_recipe  # noqa: PLC0415
    from lenspipe.runs import run as carry_out  # noqa: PLC0415

    asked = load_recipe(recipe, settings or ())
    with Progress(quiet) as progress:

        def on_plan(found: "Plan") -> None:
            if not quiet:
                _print_plan(found, stderr=True)
            progress.begin(found)

        path = carry_out(
            asked, say=lambda line: None if quiet else _say(line), on_plan=on_plan, on_work=progress.advance
        )
    print(path)


@app.command()
def show(
    dataset: DatasetPath,
    by: Annotated[str | None, typer.Option(help="Break answers down by this kept column.")] = None,
) -> None:
    """Print a dataset's summary: one line a layer."""
    from lenspipe.analysis import emergence, layer_table, open_dataset  # noqa: PLC0415

    ds = open_dataset(dataset)
    gate = ds.lens.gate
    sizes = ds.sizes
    print(f"{ds.attrs['model']}: {sizes['document']:,} documents, {sizes['token']:,} tokens, {sizes['layer']} layers")
    print(f"identity gate: logits differ by {gate['difference']:.1e} of the largest (at most {gate['tolerance']:.0e})")
    formats = {"top1": ".1%", "answer_top1": ".1%", "answer_top10": ".1%", "rank": ".0f", "answer_rank": ".0f"}
    for part in _lenses(ds):
        if "lens" in ds.dims:
            print(f"lens {part['lens'].values}")
        _print_frame(layer_table(part), formats)
        if by:
            print(f"share of answers ranked first, by {by}")
            groups = emergence(part, by)
            _print_frame(groups, dict.fromkeys(groups.columns, ".0%"))


@app.command()
def plot(
    dataset: DatasetPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .svg or .pdf.")] = Path("lens.png"),
    document: Annotated[int | None, typer.Option(help="Draw this document's token x layer heat map.")] = None,
    by: Annotated[str | None, typer.Option(help="Draw where answers emerge, by this kept column.")] = None,
    target: Annotated[str | None, typer.Option(help="Whose rank: next, answer, or a tracked token.")] = None,
    within: Annotated[int, typer.Option(help="With --by: count an answer among so many best.", min=1)] = 10,
    first: Annotated[int, typer.Option(help="With --document: the first row to draw.", min=0)] = 0,
    lens: Annotated[str | None, typer.Option(help="Which lens, in a dataset of several.")] = None,
) -> None:
    """Draw a dataset: the rank of the target by layer, or one document's heat map."""
    from lenspipe import plots  # noqa: PLC0415
    from lenspipe.analysis import one_lens, open_dataset  # noqa: PLC0415

    ds = one_lens(open_dataset(dataset), lens)
    if document is not None:
        figure = plots.heatmap(ds, document, first)
    elif by is not None:
        figure = plots.emergence_by_group(ds, by, within)
    else:
        figure = plots.rank_by_layer(ds, target or ("answer" if "answer_rank" in ds else "next"))
    plots.save(figure, output)
    print(output)


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
    for part in _lenses(ds):
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
    _print_frame(scores, dict.fromkeys(scores.columns, ".4f"))


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _table(*columns: tuple[str, Any]) -> Any:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _print(table: Any, stderr: bool = False) -> None:
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=max(console.width, 160))
    console.print(table)


def _print_plan(found: "Plan", stderr: bool) -> None:
    table = _table(("stage", "left"), ("artifacts", "right"), ("reused", "right"), ("to do", "right"))
    for stage, total, todo in found.counts():
        table.add_row(stage, f"{total:,}", f"{total - todo:,}", f"{todo:,}")
    write = print if not stderr else _say
    exact = "" if len(found.tokens) == len(found.shards) else "about "
    documents = found.shards[-1].stop
    write(
        f"{found.facts.name}: {documents:,} documents, {exact}{found.n_tokens():,} tokens, "
        f"{len(found.shards):,} shards, {len(found.sites)} sites"
    )
    _print(table, stderr)
    if found.is_done:
        write(f"everything is cached; nothing to do\ndataset {found.dataset_path}")
    else:
        model = "" if found.loads_model else "; no model needed"
        size = found.bytes_to_write() / 2**20
        write(f"to write: at most about {size:,.1f} MiB in {found.files_to_write():,} files{model}")
    for name in found.damaged:
        if not stderr:
            write(f"artifact {name} is damaged and would be redone")


def _print_frame(frame: Any, formats: dict[str, str]) -> None:
    from rich.text import Text  # noqa: PLC0415

    def spell(value: Any, name: object) -> str:
        if not isinstance(value, float):
            return str(value)
        return "—" if value != value else format(value, formats.get(str(name), ".3f"))

    table = _table(("layer", "right"), *((str(name), "left" if name == "site" else "right") for name in frame.columns))
    for layer, row in frame.iterrows():
        table.add_row(f"{layer:g}", *(Text(spell(value, name)) for name, value in row.items()))
    _print(table)


def _lenses(ds: Any) -> list[Any]:
    """Take a dataset apart by lens, if it has several."""
    return [ds.sel(lens=name) for name in ds["lens"].values] if "lens" in ds.dims else [ds]


def _print_reading(ds: Any) -> None:
    from rich.text import Text  # noqa: PLC0415

    if str(ds["lens"].values) != "logit":
        print(f"lens {ds['lens'].values}")
    best = [(f"{i + 1}.", "left") for i in range(ds.sizes["k"])]
    table = _table(("layer", "right"), ("entropy", "right"), ("KL to last", "right"), *best)
    probabilities = _exp(ds["topk_logit"].values - ds["logsumexp"].values[:, None])
    words = ds["vocab_token"].values[ds["topk_id"].values]
    for i in reversed(range(ds.sizes["layer"])):
        row = ds.isel(layer=i)
        cells = [f"{str(word)!r} {p:.1%}" for word, p in zip(words[i], probabilities[i], strict=True)]
        numbers = f"{float(row['layer']):g}", f"{float(row['entropy']):.2f}", f"{float(row['kl_final']):.2f}"
        table.add_row(*numbers, *map(Text, cells))
    _print(table)


def _exp(values: Any) -> Any:
    import numpy as np  # noqa: PLC0415

    return np.exp(values)


if __name__ == "__main__":
    main()
