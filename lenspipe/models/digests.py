"""Digest: SHA-256 of bytes that exist, remembered so that a large file is hashed once.

A file is remembered by path, size and modification time, in one small file under lenspipe's cache folder. A file in
a hub snapshot is a link to a blob; where the blob's name is its SHA-256, the name serves.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lenspipe.folders import cache_folder


def digest_files(paths: Iterable[Path]) -> dict[str, str]:
    """Hash files: name -> SHA-256 in hexadecimal, sorted by name."""
    memory = _remembered()
    before = dict(memory)
    found = {path.name: _digest_file(path, memory) for path in sorted(paths)}
    if memory != before:
        _remember(memory)
    return found


def _digest_file(path: Path, memory: dict[str, str]) -> str:
    blob = path.resolve()
    if blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return blob.name
    facts = blob.stat()
    entry = f"{blob}|{facts.st_size}|{facts.st_mtime_ns}"
    if entry not in memory:
        with blob.open("rb") as file:
            memory[entry] = hashlib.file_digest(file, "sha256").hexdigest()
    return memory[entry]


def _remembered() -> dict[str, str]:
    try:
        memory = json.loads((cache_folder() / "digests.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _remember(memory: dict[str, str]) -> None:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=folder, prefix="digests-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(memory, file, indent=0, sort_keys=True)
    Path(draft).replace(folder / "digests.json")
