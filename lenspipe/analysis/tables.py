"""Tables: a dataset in a few numbers a layer.

Means leave out special tokens, missing targets, and rows whose logits are not finite at some layer. They are means of
documents' means, so that a long document counts no more than a short one, and standard errors are over documents.
"""

import numpy as np
import pandas as pd
import xarray as xr

from lenspipe.analysis.opening import one_lens
from lenspipe.errors import RequestError


def layer_table(ds: xr.Dataset) -> pd.DataFrame:
    """Summarise every layer: one row each, indexed by layer.

    Columns, where the dataset has what they need: `top1` (share of tokens whose argmax is the next token), `rank`
    (median rank of the next token), `log_prob` (of the next token, nats), `entropy` and `kl_final` (nats), and
    `answer_top1`, `answer_top10`, `answer_rank` (median), read at the last row of each document.
    """
    ds = one_lens(ds)
    plain = ~ds["is_special"].values
    document = ds["document"].values
    columns: dict[str, object] = {"site": ds["site"].values.astype(object)}
    if "target_rank" in ds:
        rank = ds["target_rank"].values
        valid = plain & (rank >= 0).all(axis=0)
        columns["top1"] = _by_document(rank == 0, valid, document)
        columns["rank"] = np.median(rank[:, valid], axis=1) if valid.any() else np.full(len(rank), np.nan)
        if "logsumexp" in ds:
            columns["log_prob"] = _by_document(ds["target_logit"].values - ds["logsumexp"].values, valid, document)
    for name in ("entropy", "kl_final"):
        if name in ds:
            values = ds[name].values
            columns[name] = _by_document(values, plain & np.isfinite(values).all(axis=0), document)
    if "answer_rank" in ds:
        rank = _at_last_row(ds)
        rank = rank[:, (rank >= 0).all(axis=0)]
        columns["answer_top1"] = (rank == 0).mean(axis=1)
        columns["answer_top10"] = (rank < 10).mean(axis=1)
        columns["answer_rank"] = np.median(rank, axis=1)
    return pd.DataFrame(columns, index=pd.Index(ds["layer"].values, name="layer"))


def emergence(ds: xr.Dataset, by: str, within: int = 1) -> pd.DataFrame:
    """Count at which layers answers have emerged: per layer and group, the share with rank < within.

    Args:
        ds: a dataset with an answer column.
        by: a kept column, whose values become the table's columns.
        within: 1 for the argmax, 10 for the ten best.

    Raises:
        RequestError: no answers, or no such column.
    """
    ds = one_lens(ds)
    if "answer_rank" not in ds:
        raise RequestError("this dataset tracks no answers: set read.answer to a column and run again")
    if by not in ds.variables or ds[by].dims != ("document",):
        kept = [str(name) for name in ds.coords if ds[name].dims == ("document",) and name != "document_length"]
        raise RequestError(f"no column {by!r} was kept; this dataset has {', '.join(kept) or 'none'}")
    shown = np.unique(ds["document"].values)
    groups = ds[by].values.astype(object)[shown]
    rank = _at_last_row(ds)
    finite = (rank >= 0).all(axis=0)
    hits, groups = rank[:, finite] < within, groups[finite]
    found = {group: hits[:, groups == group].mean(axis=1) for group in sorted(set(groups))}
    return pd.DataFrame(found, index=pd.Index(ds["layer"].values, name="layer"))


def _at_last_row(ds: xr.Dataset) -> np.ndarray:
    document = ds["document"].values
    last = np.flatnonzero(np.append(document[1:] != document[:-1], True))
    found: np.ndarray = ds["answer_rank"].isel(token=last).values
    return found


def _by_document(values: np.ndarray, valid: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Mean over documents of each document's mean over its valid rows: [layer]."""
    if not valid.any():
        return np.full(len(values), np.nan)
    _, number = np.unique(document[valid], return_inverse=True)
    counts = np.bincount(number)
    return np.array([(np.bincount(number, row) / counts).mean() for row in values[:, valid].astype(np.float64)])
