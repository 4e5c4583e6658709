"""Opening: a finished dataset with the indexes that make it easy to ask."""

from pathlib import Path

import xarray as xr

from lenspipe.errors import RequestError, StoreError
from lenspipe.folders import copy_of, is_url
from lenspipe.storage.artifacts import ArtifactStore


def open_dataset(path: Path | str) -> xr.Dataset:
    """Open a dataset, lazily, with lookup by layer, site, document and position.

    Args:
        path: the Zarr store that `lenspipe run` printed, or its place in a store at a URL, from which it is fetched.

    Returns:
        The dataset. `ds.sel(layer=11)`, `ds.sel(site="resid_post.10")` and `ds.sel(document=3, position=0)` look up;
        `ds.lens` asks the usual questions.

    Raises:
        RequestError: nothing there, or not a dataset of lenspipe.
        DamagedArtifactError: in its store, it is not what was written, by names, sizes and metadata; it has been set
            aside, to be made again by its recipe's next run. Chunks carry checksums of their own.
        StoreError: it cannot be read.
    """
    path = _located(str(path))
    if not (path / "zarr.json").is_file():
        raise RequestError(
            f"no dataset at {path}: give the path that `lenspipe run` prints, which ends in dataset.zarr"
        )
    if (artifact := ArtifactStore.artifact_of(path.parent)) is not None:
        store, stage, key = artifact
        store.open(stage, key, checked="zarr.json")
    try:
        ds = xr.open_zarr(path, chunks=None)
    except Exception as error:  # zarr and xarray raise many kinds for a damaged store
        raise StoreError(f"cannot open {path}: {error}") from error
    if missing := {"layer", "site", "document", "position", "input_id"} - set(ds.variables):
        raise RequestError(f"{path} is a Zarr store but no dataset of lenspipe: it has no {', '.join(sorted(missing))}")
    try:
        return indexed(ds)
    except Exception as error:  # a dataset that another program wrote under our names
        raise StoreError(f"{path} is no dataset as lenspipe writes it: {error}") from error


def _located(path: str) -> Path:
    if not is_url(path):
        return Path(path).absolute()
    url, *parts = path.rstrip("/").rsplit("/", 5)
    if len(parts) != 5 or parts[0] != "assemble":
        raise RequestError(
            f"no dataset at {path}: give the address that `lenspipe run` says, which ends in dataset.zarr"
        )
    folder, _ = ArtifactStore(copy_of(url)).open("assemble", parts[2])
    return folder / parts[4]


def indexed(ds: xr.Dataset) -> xr.Dataset:
    """Add the indexes: layer and lens have theirs; site, and document with position, get one.

    Small variables are loaded; readouts stay where they are.
    """
    small = [name for name in ds.variables if "layer" not in ds[name].dims or ds[name].dims == ("layer",)]
    for name in small:
        ds[name].load()
    found: xr.Dataset = ds.set_xindex("site").set_xindex(["document", "position"])
    return found


def one_lens(ds: xr.Dataset, name: str | None = None) -> xr.Dataset:
    """Select one lens of a dataset that was read with several.

    Args:
        ds: with or without a dimension `lens`.
        name: which; None if there is only one.

    Raises:
        RequestError: no such lens, or several and none is named.
    """
    names = [str(known) for known in ds["lens"].values.ravel()] if "lens" in ds.variables else ["logit"]
    if (name is None and "lens" in ds.dims) or (name is not None and name not in names):
        asked = f"no lens {name!r}" if name else "several lenses: choose one, as in ds.sel(lens=...)"
        raise RequestError(f"{asked}; this dataset has {', '.join(map(repr, names))}")
    return ds.sel(lens=name) if "lens" in ds.dims else ds
