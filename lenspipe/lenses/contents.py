"""Contents: the names that a file of tensors holds, found without loading it.

A torch.save file is a zip archive of raw numbers and one pickle, data.pkl, which is a program: here its instructions
are listed and none is run. A safetensors file begins with its names as JSON.
This module knows no lens and imports no torch.
"""

import json
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lenspipe.errors import RequestError

_SAVE_AGAIN = "load it where its origin is trusted and save plain tensors again, with torch.save or as safetensors"

_PROTOCOL = 2
"""The pickle protocol that torch.save writes, and the last that torch.load reads without running code."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file of tensors holds.

    Attributes:
        container: torch (a torch.save archive) or safetensors.
        names: texts in order: the tensors' names and, in a torch.save file, whatever other texts it holds.
    """

    container: Literal["torch", "safetensors"]
    names: tuple[str, ...]


def contents_of(path: Path) -> Contents:
    """List what a file of tensors holds.

    Raises:
        RequestError: the file is neither container, is damaged, or would run code if it were loaded.
    """
    with path.open("rb") as file:
        start = file.read(9)
    if start.startswith(b"PK\x03\x04"):
        return Contents("torch", _names_in_pickle(_pickle_in(path), path))
    if start[8:] == b"{":
        return Contents("safetensors", _names_in_header(path))
    found = "empty" if not start else "a bare pickle" if start[0] == 0x80 else f"something that begins {start!r}"
    raise RequestError(
        f"{path} is {found}: expected what torch.save (torch 1.6 or later) writes, or safetensors; {_SAVE_AGAIN}"
    )


def verify(path: Path) -> None:
    """Compare a torch.save file with the checksums it carries; torch.load does not.

    Raises:
        RequestError: bytes have changed since the file was written.
    """
    with _opened(path) as archive:
        broken = archive.testzip()
    if broken is not None:
        raise _damaged(path, f"the checksum of {broken} does not match")


def _damaged(path: Path, why: str) -> RequestError:
    return RequestError(f"{path} is cut short or damaged ({why}): copy or download it again")


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error) as error:
        raise _damaged(path, str(error)) from error


def _pickle_in(path: Path) -> bytes:
    with _opened(path) as archive:
        entries = archive.infolist()
        # torch.save compresses nothing: such a file is no larger in memory than it is on the disk.
        if packed := [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]:
            raise RequestError(f"{path} holds {packed[0]} compressed, which torch.save never does: {_SAVE_AGAIN}")
        pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise RequestError(
                f"{path} is a zip archive with {len(pickles)} files data.pkl, but torch.save writes exactly one: "
                "point to the file of tensors itself"
            )
        return archive.read(pickles[0])


def _names_in_pickle(program: bytes, path: Path) -> tuple[str, ...]:
    names: dict[str, None] = {}
    try:
        for instruction, value, _ in pickletools.genops(program):
            if instruction.name in ("GLOBAL", "INST") and not _is_tensor_part(str(value)):
                raise RequestError(
                    f"{path} would run code if it were loaded, for it names {str(value).replace(' ', '.')!r}; "
                    f"nothing of it was run. A lens is plain tensors: {_SAVE_AGAIN}"
                )
            if instruction.name == "PROTO" and value is not None and value > _PROTOCOL:
                raise RequestError(
                    f"{path} is pickled with protocol {value}, but tensors can be read without running code "
                    f"only up to protocol {_PROTOCOL}: {_SAVE_AGAIN}"
                )
            if isinstance(value, str):
                names[value] = None
    except ValueError as error:
        raise _damaged(path, f"data.pkl: {error}") from error
    return tuple(names)


def _is_tensor_part(name: str) -> bool:
    # A first sieve, and a clear message while planning; torch.load(weights_only=True) is the wall.
    return (
        name.startswith(("torch ", "torch._utils ", "torch.storage ", "torch.serialization "))
        or name == "collections OrderedDict"
    )


def _names_in_header(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise _damaged(path, f"a header of {length} bytes does not fit in it")
        header = file.read(length)
    try:
        names = json.loads(header, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header: {error}") from error
    return tuple(name for name in names if name != "__metadata__")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return values
