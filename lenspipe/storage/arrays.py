"""Arrays of an artifact: small ones together in one safetensors file, residuals as a chunked Zarr group.

Both refuse to give numbers that are not the ones written: the safetensors file is compared with its CRC-32C in the
manifest, Zarr chunks carry a CRC-32C each. Neither executes anything when opened.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from lenspipe.storage.artifacts import ArtifactStore

TABLE = "arrays.safetensors"
RESIDUAL = "residual.zarr"
CHUNK_BYTES = 2**23
Array = npt.NDArray[Any]


def write_table(folder: Path, arrays: Mapping[str, Array]) -> None:
    """Write named arrays as the artifact's table."""
    # Not save_file, whose error for a full disk is no OSError.
    (folder / TABLE).write_bytes(safetensors.numpy.save({name: np.ascontiguousarray(a) for name, a in arrays.items()}))


def read_table(store: ArtifactStore, stage: str, key: str) -> dict[str, Array]:
    """Read an artifact's table, its bytes checked.

    Raises:
        DamagedArtifactError: absent or not what was written; set aside.
    """
    folder, _ = store.open(stage, key, checked="")
    try:
        found: dict[str, Array] = safetensors.numpy.load_file(folder / TABLE)
        return found
    except (FileNotFoundError, safetensors.SafetensorError, KeyError) as error:  # KeyError: a type that numpy has not
        raise store.set_aside(stage, key) from error


@dataclass
class ResidualWriter:
    """Writes one cell's residuals in reading order, whole chunks only.

    Attributes:
        folder: the draft's.
        row: per row in reading order, its number in document order.
        width: d_model.
        dtype: numpy name of the container: float32, or float16 for an fp16 model.
        attributes: written on the group.
    """

    folder: Path
    row: Array
    width: int
    dtype: str
    attributes: Mapping[str, Any]
    _array: Any = field(init=False)
    _buffer: Array = field(init=False)
    _held: int = field(init=False, default=0)
    _written: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        rows = max(1, min(len(self.row), CHUNK_BYTES // (self.width * np.dtype(self.dtype).itemsize)))
        store = self.folder / RESIDUAL
        common: dict[str, Any] = {
            "store": store,
            "compressors": [BloscCodec(cname="lz4", clevel=1, shuffle="bitshuffle"), Crc32cCodec()],
            "config": {"write_empty_chunks": True},
        }
        zarr.create_group(store, attributes=dict(self.attributes))
        self._array = zarr.create_array(
            name="residual",
            shape=(len(self.row), self.width),
            chunks=(rows, self.width),
            dtype=self.dtype,
            dimension_names=("token", "d_model"),
            **common,
        )
        index = zarr.create_array(
            name="row", shape=self.row.shape, chunks=self.row.shape, dtype="int64", dimension_names=("token",), **common
        )
        index[:] = self.row
        self._buffer = np.empty((rows, self.width), dtype=self.dtype)

    def append(self, residual: Array) -> None:
        """Add rows in reading order: [rows, d_model].

        Raises:
            ValueError: rows of another width.
        """
        if residual.shape[1:] != (self.width,):
            raise ValueError(f"residual rows have shape {residual.shape[1:]}, expected ({self.width},)")
        while len(residual):
            take = min(len(residual), len(self._buffer) - self._held)
            self._buffer[self._held : self._held + take] = residual[:take]
            self._held += take
            residual = residual[take:]
            if self._held == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        self._array[self._written : self._written + self._held] = self._buffer[: self._held]
        self._written += self._held
        self._held = 0

    def finish(self) -> None:
        """Write the last, short chunk.

        Raises:
            ValueError: fewer rows were appended than announced.
        """
        if self._held:
            self._flush()
        if self._written != len(self.row):
            raise ValueError(f"{self._written} of {len(self.row)} rows were written")


@dataclass(frozen=True)
class ResidualReader:
    """Reads one cell's residuals in reading order.

    Attributes:
        store, key: the capture artifact.
        array: the Zarr array.
    """

    store: ArtifactStore
    key: str
    array: Any

    def rows(self, start: int, stop: int) -> Array:
        """Read rows [start, stop): [rows, d_model].

        Raises:
            DamagedArtifactError: a chunk is not what was written; the artifact has been set aside.
        """
        chunks = range(start // self.array.chunks[0], -(-stop // self.array.chunks[0]))
        folder = self.store.path("capture", self.key) / RESIDUAL / "residual"
        if not all((folder / "c" / str(chunk) / "0").is_file() for chunk in chunks):
            raise self.store.set_aside("capture", self.key)  # Zarr would read a missing chunk as zeros
        try:
            found: Array = self.array[start:stop]
            return found
        except (MemoryError, OSError):  # the machine's trouble, not the artifact's
            raise
        except Exception as error:  # codecs raise many kinds for damaged bytes
            raise self.store.set_aside("capture", self.key) from error


def open_residual(store: ArtifactStore, key: str, shape: tuple[int, int] | None = None) -> ResidualReader:
    """Open a capture artifact's residuals, which must be of `shape`, [rows, d_model], if one is given.

    Raises:
        DamagedArtifactError: absent or not whole; set aside.
    """
    # Chunks carry their own checksums; the metadata that says where they are does not.
    folder, _ = store.open("capture", key, checked="zarr.json")
    try:
        array: Any = zarr.open_group(folder / RESIDUAL, mode="r")["residual"]
        if array.ndim != 2 or array.dtype.kind != "f" or shape not in (None, array.shape):
            raise ValueError(f"residuals of shape {array.shape} and type {array.dtype}, expected {shape}")
        return ResidualReader(store, key, array)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # damaged metadata raises many kinds
        raise store.set_aside("capture", key) from error
