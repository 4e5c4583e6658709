"""Looking: commands that read finished datasets: show, plot."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lenspipe.cli.frame import DatasetPath, app
from lenspipe.cli.tables import lenses_of, print_frame


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
    for place, n in json.loads(ds.attrs.get("nonfinite", "{}")).items():
        print(f"{n:,} rows have logits that are not finite at {place}: they are left out below, at all layers")
    formats = {"top1": ".1%", "answer_top1": ".1%", "answer_top10": ".1%", "rank": ".0f", "answer_rank": ".0f"}
    for part in lenses_of(ds):
        if "lens" in ds.dims:
            print(f"lens {part['lens'].values}")
        print_frame(layer_table(part), formats)
        if by:
            print(f"share of answers ranked first, by {by}")
            groups = emergence(part, by)
            print_frame(groups, dict.fromkeys(groups.columns, ".0%"))


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
