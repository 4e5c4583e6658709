"""Counts: what a layer says how often, and how often it is right, over the tokens of a dataset.

Special tokens are left out, and rows whose logits were not finite. Leading dimensions (lens, layer) stay.
"""

import numpy as np
import xarray as xr

from lenspipe.errors import RequestError


def first_choices(ds: xr.Dataset) -> xr.DataArray:
    """Count how often each token is a layer's argmax: int64 (layer, vocab).

    Raises:
        RequestError: topk was not among the measures.
    """
    _require(ds, "first choices", {"topk_id": "topk"})
    first = ds["topk_id"].isel(k=0)
    n_vocab = ds.sizes["vocab"]
    ids = first.values[..., ~ds["is_special"].values]
    counts = [np.bincount(row[row >= 0], minlength=n_vocab) for row in ids.reshape(-1, ids.shape[-1])]
    dims = first.dims[:-1]
    return xr.DataArray(
        np.array(counts).reshape(*ids.shape[:-1], n_vocab),
        dims=(*dims, "vocab"),
        coords={name: ds[name] for name in ds.coords if set(ds[name].dims) <= {*dims, "vocab"}},
        name="first_choices",
        attrs={"long_name": "rows whose argmax is the token", "units": "1"},
    )


def calibration(ds: xr.Dataset, bins: int = 10) -> xr.Dataset:
    """Hold a layer's confidence, the probability of its argmax, against how often the argmax is the next token.

    Args:
        ds: a dataset with topk, logsumexp and target.
        bins: of confidence, equally wide from 0 to 1.

    Returns:
        Per (layer, bin): `count` of rows, their mean `confidence` and their `accuracy` (NaN where there are none), and
        per layer the expected calibration error `ece`, the mean of |confidence - accuracy| weighted by count
        (Naeini et al. 2015).

    Raises:
        RequestError: a measure is missing, or bins is below 1.
    """
    _require(ds, "calibration", {"topk_logit": "topk", "logsumexp": "logsumexp", "target_rank": "target"})
    if bins < 1:
        raise RequestError(f"bins is {bins}: ask for at least one")
    shape = ds["logsumexp"].shape[:-1]
    confidence = np.exp(ds["topk_logit"].isel(k=0).values - ds["logsumexp"].values).reshape(-1, ds.sizes["token"])
    rank = ds["target_rank"].values.reshape(confidence.shape)
    counted = ~ds["is_special"].values & (rank >= 0)
    count, total, right = (np.zeros((len(confidence), bins)) for _ in range(3))
    for i, (row, of_row) in enumerate(zip(confidence, counted, strict=True)):
        at = np.minimum((row[of_row] * bins).astype(np.int64), bins - 1)
        count[i] = np.bincount(at, minlength=bins)
        total[i] = np.bincount(at, row[of_row], minlength=bins)
        right[i] = np.bincount(at, rank[i, of_row] == 0, minlength=bins)
    with np.errstate(invalid="ignore"):
        error = np.abs(total - right).sum(axis=1) / count.sum(axis=1)
        found = {"count": count.astype(np.int64), "confidence": total / count, "accuracy": right / count}
    dims = ds["logsumexp"].dims[:-1]
    variables = {name: ((*dims, "bin"), values.reshape(*shape, bins)) for name, values in found.items()}
    coords = {name: ds[name] for name in ds.coords if set(ds[name].dims) <= set(dims)}
    edges = np.linspace(0, 1, bins + 1)
    return xr.Dataset(
        variables | {"ece": (dims, error.reshape(shape))}, {**coords, "bin": (edges[:-1] + edges[1:]) / 2}
    )


def _require(ds: xr.Dataset, what: str, needed: dict[str, str]) -> None:
    if missing := [measure for name, measure in needed.items() if name not in ds]:
        raise RequestError(f"{what} needs {', '.join(missing)}: add it to read.measures and run again")
