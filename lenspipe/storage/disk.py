"""Disk: files and folders that are still there when the power comes back, and the errors of a disk that takes none."""

import errno
import os
import uuid
from pathlib import Path

from lenspipe.errors import StoreError
from lenspipe.storage.remote import remote_behind

WRITING = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EIO,
}
"""Errors that mean that a store cannot be written; others come from what the block did."""


def write_through(root: Path, name: str, text: str) -> None:
    """Write a small file of a store so that it is there in whole or as it was before, on the disk or behind the folder.

    Raises:
        StoreError: it cannot be written.
    """
    path = root / name
    new = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    if remote := remote_behind(root):
        remote.put(name, text.encode())
    try:
        make_folder(path.parent)
        try:
            new.write_text(text, encoding="utf-8")
            sync(new)
            new.rename(path)
            sync(path.parent)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in WRITING:
            raise
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, written through to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and all in it are on the disk."""
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(base, name))
        sync(Path(base))
