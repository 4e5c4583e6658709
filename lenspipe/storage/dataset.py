"""Dataset store: one Zarr format 3 group that xarray opens without lenspipe.

Small variables first, then the readouts in whole chunks, then a count of the chunks, then metadata consolidated.
The folder is a draft of the artifact store until all that is done.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from lenspipe.errors import StoreError
from lenspipe.variables import BY_NAME, Variable

CHUNK_TOKENS = 65536
_COMPRESSORS = (BloscCodec(cname="zstd", clevel=3, shuffle="shuffle"), Crc32cCodec())


@dataclass(frozen=True)
class DatasetWriter:
    """Writes one dataset: small variables whole, readouts block by block.

    Attributes:
        path: the Zarr group to be.
        sizes: length of every dimension.
    """

    path: Path
    sizes: Mapping[str, int]
    _arrays: dict[str, Any] = field(default_factory=dict)

    def token_blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of token that are whole chunks."""
        n = self.sizes["token"]
        return ((start, min(start + CHUNK_TOKENS, n)) for start in range(0, n, CHUNK_TOKENS))

    def create(
        self, small: Mapping[str, tuple[tuple[str, ...], Any]], large: Sequence[Variable], attributes: Mapping[str, Any]
    ) -> None:
        """Write everything but the readouts, for which only the place is made.

        Args:
            small: coordinates and variables: name -> (dims, values).
            large: readout variables, to be written by `write`.
            attributes: of the dataset.
        """
        dataset = in_memory(small, attributes)
        encoding: dict[str, dict[str, Any]] = {str(name): {"_FillValue": None} for name in dataset.variables}
        for name, stored in dataset.variables.items():
            if stored.dtype.kind in "iufb":
                chunks = tuple(min(max(size, 1), 16 * CHUNK_TOKENS) for size in stored.shape)
                encoding[str(name)] |= {"compressors": _COMPRESSORS, "chunks": chunks}
        dataset.to_zarr(self.path, zarr_format=3, consolidated=False, write_empty_chunks=True, encoding=encoding)
        for variable in large:
            dims = readout_dims(variable, self.sizes)
            within = {"lens": 1, "layer": 1, "token": CHUNK_TOKENS}
            self._arrays[variable.name] = zarr.create_array(
                self.path,
                name=variable.name,
                shape=tuple(self.sizes[dim] for dim in dims),
                chunks=tuple(min(within.get(dim, self.sizes[dim]), self.sizes[dim]) for dim in dims),
                dtype=variable.dtype,
                compressors=_COMPRESSORS,
                dimension_names=dims,
                attributes=variable.attributes,
                config={"write_empty_chunks": True},
            )

    def write(self, variable: Variable, place: tuple[int, ...], start: int, values: npt.NDArray[Any]) -> None:
        """Write one readout variable at one (lens and) layer, for whole chunks of token from `start` on."""
        self._arrays[variable.name][(*place, slice(start, start + len(values)))] = values

    def finish(self) -> None:
        """Count the chunks and consolidate the metadata.

        Raises:
            StoreError: a chunk was not written.
        """
        group = zarr.open_group(self.path, mode="r+")
        for name, array in group.arrays():
            if array.nchunks_initialized != array.nchunks:
                raise StoreError(f"{name}: {array.nchunks_initialized} of {array.nchunks} chunks were written")
        with warnings.catch_warnings():
            # Zarr warns that consolidated metadata is not in its specification; without it, readers warn instead.
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(group.store)


def readout_dims(variable: Variable, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Dimensions of a readout in a dataset of these sizes: `lens` comes first where there is such a dimension."""
    return ("lens", *variable.dims) if "lens" in sizes else variable.dims


def in_memory(placed: Mapping[str, tuple[tuple[str, ...], Any]], attributes: Mapping[str, Any]) -> xr.Dataset:
    """Make a dataset of variables and coordinates, name -> (dims, values), with what variables.py says of them."""
    variables = {n: xr.Variable(dims, values, _attributes(n)) for n, (dims, values) in placed.items()}
    data = [name for name in placed if name in BY_NAME and BY_NAME[name].measure]
    return xr.Dataset(
        {name: variables[name] for name in data},
        coords={name: variable for name, variable in variables.items() if name not in data},
        attrs=dict(attributes),
    )


def _attributes(name: str) -> dict[str, Any]:
    if name not in BY_NAME:
        return {"long_name": f"column {name!r} of the corpus", "units": "1", "definition": "kept as in the source"}
    found = BY_NAME[name].attributes
    return {**found, "sample_dimension": "token"} if name == "document_length" else found


def object_array(values: list[Any]) -> npt.NDArray[Any]:
    """Make an array for a kept column: strings as objects, numbers and booleans as such.

    A column that mixes kinds, or holds missing values beside anything but numbers, becomes strings.
    """
    kinds = {type(value) for value in values}
    if kinds <= {bool}:
        return np.array(values, dtype=bool)
    if kinds <= {int} and all(-(2**63) <= value < 2**63 for value in values):
        return np.array(values, dtype=np.int64)
    if kinds <= {int, float, type(None)} and kinds - {type(None)}:
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return np.array(["" if value is None else str(value) for value in values], dtype=object)
