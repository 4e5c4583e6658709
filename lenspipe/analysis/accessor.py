"""Lens accessor: `ds.lens`, the usual questions of one dataset, answered as labelled arrays.

Targets are named alike everywhere: "next" (the actual next token), "answer" (the document's answer), or a tracked
token by its string or id.
"""

import json
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from lenspipe.analysis import counts
from lenspipe.errors import RequestError


@xr.register_dataset_accessor("lens")  # type: ignore[no-untyped-call, unused-ignore]
class Lens:
    """Questions about one dataset of lenspipe, or any selection from it."""

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe that made the dataset."""
        found: dict[str, Any] = json.loads(self._ds.attrs["recipe"])
        return found

    @property
    def gate(self) -> dict[str, Any]:
        """The figures of the identity gate."""
        found: dict[str, Any] = json.loads(self._ds.attrs["gate"])
        return found

    def doc(self, number: int) -> xr.Dataset:
        """Select one document: its rows along token, and its own columns as scalars.

        Raises:
            RequestError: no such document.
        """
        n_documents = self._ds.sizes.get("document", 0)
        if not 0 <= number < n_documents:
            raise RequestError(f"document {number}: this dataset has documents 0 to {n_documents - 1}")
        rows = np.flatnonzero(self._ds["document"].values == number)
        return self._ds.isel(token=rows, document=number)

    def tokens(self) -> xr.DataArray:
        """Spell the tokens of the text: strings (token)."""
        return self._strings("input_id", "tokens of the text")

    def top_tokens(self) -> xr.DataArray:
        """Spell the k most likely tokens: strings (layer, token, k)."""
        return self._strings("topk_id", "most likely tokens")

    def rank_trajectory(self, target: str | int = "next") -> xr.DataArray:
        """Look up a target's rank at every layer and token: (layer, token), 0 is the argmax, -1 is missing.

        Raises:
            RequestError: no such target in this dataset; lists those it has.
        """
        return self._target(target, "rank")

    def log_prob(self, target: str | int = "next") -> xr.DataArray:
        """Compute a target's log-probability, in nats: (layer, token); NaN where the target is missing.

        Raises:
            RequestError: no such target, or logsumexp was not among the measures.
        """
        logit = self._target(target, "logit")
        if "logsumexp" not in self._ds:
            raise RequestError("log_prob needs logsumexp: add it to read.measures and run again")
        found = logit - self._ds["logsumexp"]
        attributes = {"long_name": f"log-probability of {target!r}", "units": "nats"}
        return found.rename("log_prob").assign_attrs(attributes)

    def first_choices(self) -> xr.DataArray:
        """Count how often each token is a layer's argmax; see `analysis.counts.first_choices`."""
        return counts.first_choices(self._ds)

    def calibration(self, bins: int = 10) -> xr.Dataset:
        """Hold confidence against accuracy; see `analysis.counts.calibration`."""
        return counts.calibration(self._ds, bins)

    def to_dataframe(self) -> pd.DataFrame:
        """Lay the dataset out as a table, one row per (layer, token).

        Columns: lens (where there are several), layer, site, document, position, token (string), is_special, the kept
        columns, then every readout with one value per row. Tracked tokens become columns of their own, the top-k's
        first entry `top1` and `top1_logit`.
        """
        ds = self._ds
        if "lens" in ds.dims:
            frames = [ds.sel(lens=name).lens.to_dataframe() for name in ds["lens"].values]
            names = np.repeat(ds["lens"].values.astype(object), [len(frame) for frame in frames])
            together: pd.DataFrame = pd.concat(frames, ignore_index=True)
            together.insert(0, "lens", names)
            return together
        ds = ds.expand_dims([dim for dim in ("layer", "token") if dim not in ds.dims])
        n_layers, n_tokens = ds.sizes["layer"], ds.sizes["token"]
        document = np.broadcast_to(ds["document"].values, n_tokens)
        frame: dict[str, Any] = {
            "layer": np.repeat(ds["layer"].values, n_tokens),
            "site": np.repeat(ds["site"].values.astype(object), n_tokens),
        }
        by_token = {"document": document, "position": ds["position"].values, "token": ds.lens.tokens().values}
        by_token["is_special"] = ds["is_special"].values
        for name in self._document_columns():
            values = ds[name].values
            by_token[name] = values[document] if values.ndim else np.full(n_tokens, values)
        for name, values in by_token.items():
            plain = values.astype(object) if values.dtype.kind not in "iufb" else values
            frame[name] = np.tile(np.broadcast_to(plain, n_tokens), n_layers)
        for name in map(str, ds.data_vars):
            if ds[name].dims[:2] == ("layer", "token") and ds[name].ndim == 2:
                frame[name] = ds[name].values.ravel()
        if "topk_id" in ds:
            frame["top1"] = ds.lens.top_tokens().isel(k=0).values.astype(object).ravel()
            frame["top1_logit"] = ds["topk_logit"].isel(k=0).values.ravel()
        if "tracked" in ds.dims:
            for i, name in enumerate(map(str, ds["tracked"].values)):
                frame[f"rank of {name!r}"] = ds["tracked_rank"].values[..., i].ravel()
                frame[f"logit of {name!r}"] = ds["tracked_logit"].values[..., i].ravel()
        return pd.DataFrame(frame)

    def _document_columns(self) -> list[str]:
        asked = self.recipe
        names = [*asked["corpus"]["columns"], *([asked["read"]["answer"]] if asked["read"]["answer"] else [])]
        return [name for name in dict.fromkeys(names) if name in self._ds.variables]

    def _strings(self, name: str, long_name: str) -> xr.DataArray:
        if name not in self._ds:
            raise RequestError(f"this dataset has no {name}: add topk to read.measures and run again")
        ids = self._ds[name]
        strings = self._ds["vocab_token"].values.astype(object)[ids.values]
        return ids.copy(data=strings).rename(f"{name.removesuffix('_id')}_token").assign_attrs(long_name=long_name)

    def _target(self, target: str | int, what: str) -> xr.DataArray:
        ds = self._ds
        name = {"next": "target", "answer": "answer"}.get(str(target))
        if name and f"{name}_{what}" in ds:
            return ds[f"{name}_{what}"]
        if "tracked" in ds.dims:
            by_id = isinstance(target, int)
            known = ds["tracked_id"].values if by_id else ds["tracked"].values.astype(object)
            places = np.flatnonzero(known == target)
            if len(places):
                return ds[f"tracked_{what}"].isel(tracked=int(places[0]))
        raise RequestError(f"no target {target!r} in this dataset; it has {', '.join(self._targets()) or 'none'}")

    def _targets(self) -> list[str]:
        found = [label for label, name in (("next", "target"), ("answer", "answer")) if f"{name}_rank" in self._ds]
        tracked = map(str, self._ds["tracked"].values) if "tracked" in self._ds.dims else ()
        return [repr(label) for label in (*found, *tracked)]
