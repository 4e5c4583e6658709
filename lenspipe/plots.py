"""Plots: pictures of a finished dataset, as matplotlib figures.

Strings from corpora and vocabularies are drawn as they are, never as mathematical notation.
"""

import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lenspipe.analysis.opening import one_lens
from lenspipe.analysis.tables import emergence
from lenspipe.errors import RequestError

_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "text.parse_math": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
}


def rank_by_layer(ds: xr.Dataset, target: str | int = "next") -> Figure:
    """Draw how a target's rank falls with depth: median over tokens, and the middle half of them.

    Args:
        ds: an opened dataset.
        target: as in `ds.lens.rank_trajectory`; an answer is read at the last row of each document.
    """
    ds = one_lens(ds)
    ranks = ds.lens.rank_trajectory(target).values
    document = ds["document"].values
    last = np.append(document[1:] != document[:-1], True)
    rows = last if target == "answer" else ~ds["is_special"].values
    ranks = ranks[:, rows & (ranks >= 0).all(axis=0)] + 1
    if not ranks.shape[1]:
        raise RequestError(f"no token of this dataset has the target {target!r}: nothing to draw")
    low, median, high = np.quantile(ranks, (0.25, 0.5, 0.75), axis=1)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        layers = ds["layer"].values
        counted = "documents" if target == "answer" else "tokens"
        axes.fill_between(layers, low, high, color="#c6d8ea", label=f"middle half of {counted}")
        axes.plot(layers, median, color="#1f5a96", marker="o", markersize=3, label="median")
        axes.set_yscale("log")
        axes.margins(x=0)
        axes.invert_yaxis()
        axes.set(xlabel="layer (blocks applied)", ylabel="rank + 1 of all tokens")
        name = {"next": "the next token", "answer": "the answer"}.get(str(target), repr(target))
        axes.set_title(f"{ds.attrs['model']}: rank of {name}, {ranks.shape[1]:,} {counted}")
        axes.legend(loc="upper left")
    return figure


def emergence_by_group(ds: xr.Dataset, by: str, within: int = 1) -> Figure:
    """Draw at which layers answers emerge: the share of documents whose answer is among the best, per group."""
    ds = one_lens(ds)
    table = emergence(ds, by, within)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7, 3.8), layout="constrained")
        axes = figure.subplots()
        colors = mpl.colormaps["tab10" if table.shape[1] <= 10 else "tab20"].colors  # type: ignore[attr-defined]
        order = table.iloc[-1].sort_values(ascending=False, kind="stable").index
        for i, group in enumerate(order):
            axes.plot(table.index, table[group], color=colors[i % len(colors)], linewidth=1.4, label=str(group))
        best = "first" if within == 1 else f"among the {within} best"
        axes.set(xlabel="layer (blocks applied)", ylabel=f"share with the answer {best}", ylim=(-0.02, 1.02))
        axes.margins(x=0)
        axes.set_title(f"{ds.attrs['model']}: where answers emerge, by {by}")
        figure.legend(loc="outside right center", title=by)
    return figure


def heatmap(ds: xr.Dataset, document: int, first: int = 0, width: int = 24) -> Figure:
    """Draw one document, token by layer: the most likely token in each cell, coloured by its probability.

    Args:
        ds: an opened dataset with topk and logsumexp.
        document: its number.
        first, width: which of its rows to draw.
    """
    ds = one_lens(ds)
    if "topk_id" not in ds or "logsumexp" not in ds:
        raise RequestError("the heat map needs topk and logsumexp: add them to read.measures and run again")
    chosen = ds.lens.doc(document)
    n_rows = chosen.sizes["token"]
    chosen = chosen.isel(token=slice(first, first + width))
    if not chosen.sizes["token"]:
        raise RequestError(f"document {document} has {n_rows} rows: row {first} is beyond its end")
    probability = np.exp((chosen["topk_logit"].isel(k=0) - chosen["logsumexp"]).values)
    words = chosen.lens.top_tokens().isel(k=0).values
    text = chosen.lens.tokens().values
    with mpl.rc_context(_STYLE):
        size = (1.6 + 0.72 * len(text), 1.4 + 0.2 * len(words))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(probability, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1)
        for (layer, column), word in np.ndenumerate(words):
            color = "white" if probability[layer, column] > 0.6 else "#222222"
            axes.text(column, layer, _visible(word), ha="center", va="center", fontsize=6, color=color)
        axes.set_xticks(range(len(text)), [_visible(word) for word in text], rotation=45, ha="right", fontsize=7)
        axes.set_yticks(range(len(words)), [f"{layer:g}" for layer in chosen["layer"].values], fontsize=6)
        axes.set(xlabel="input token", ylabel="layer (blocks applied)")
        axes.set_title(f"{ds.attrs['model']}, document {document}: most likely next token")
        _no_spines(axes)
        figure.colorbar(image, label="its probability", fraction=0.04, pad=0.01)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the format follows the name's ending (PNG, SVG, PDF)."""
    with warnings.catch_warnings():
        # A vocabulary holds scripts that no one font has; a box in their place is all that can be drawn.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        try:
            figure.savefig(path, metadata={"Title": "lenspipe"} if path.suffix == ".png" else None)
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot write the picture {path}: {error}") from None


def _visible(token: str, most: int = 9) -> str:
    """Spell a token so that it can be seen: white space as signs, control characters as boxes, at most `most` wide."""
    leading = len(token) - len(token.lstrip(" "))
    shown = "\N{OPEN BOX}" * leading + token[leading:].replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return shown if len(shown) <= most else shown[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _no_spines(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
