"""Manifest: an artifact's account of itself, spelled so that it can be checked.

It names every payload file with its size and CRC-32C, and gives a CRC-32C of its own other lines.
"""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import google_crc32c

MANIFEST = "manifest.json"
CHECKSUM = "crc32c"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """An artifact's account of itself.

    Attributes:
        stage, key: its name.
        inputs: what the key was computed from.
        attributes: facts about the result.
        files: payload file -> (bytes, CRC-32C in hexadecimal).
        created: when.
    """

    stage: str
    key: str
    inputs: Mapping[str, Any]
    attributes: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    created: datetime


def parsed(content: bytes, stage: str, key: str) -> Manifest | None:
    """Make sense of a manifest's bytes; None where that cannot be done, or it is another artifact's."""
    try:
        text = content.decode()
        values = json.loads(text)
        if not _is_intact(text, values[CHECKSUM]):
            return None
        files = {str(name): (int(size), str(crc)) for name, (size, crc) in values["files"].items()}
        if values["format"] != FORMAT or values["stage"] != stage or values["key"] != key:
            return None
        inputs, attributes, created = dict(values["inputs"]), dict(values["attributes"]), values["created"]
        return Manifest(stage, key, inputs, attributes, files, datetime.fromisoformat(created).astimezone(UTC))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def spelled(manifest: Mapping[str, Any]) -> str:
    """Spell a manifest, with a line for the checksum of all its other lines."""

    def spell(values: Mapping[str, Any]) -> str:
        return json.dumps(values, indent=1, sort_keys=True, allow_nan=False)

    return spell({**manifest, CHECKSUM: _crc_text(spell(manifest))})


def _is_intact(text: str, crc: str) -> bool:
    """Tell whether the other lines of a manifest still have the checksum that it gives."""
    return _crc_text(text.replace(f'\n "{CHECKSUM}": "{crc}",', "", 1)) == crc


def _crc_text(text: str) -> str:
    return crc_of_bytes(text.encode())


def crc_of(path: Path) -> str:
    """CRC-32C of a file, in hexadecimal."""
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum.update(block)
    return str(checksum.hexdigest().decode())


def crc_of_bytes(content: bytes) -> str:
    """CRC-32C of bytes, in hexadecimal."""
    return str(google_crc32c.Checksum(content).hexdigest().decode())


def sizes_of(folder: Path) -> dict[str, int]:
    """Bytes of every payload file, by its path inside the folder."""
    found: dict[str, int] = {}
    waiting = [""]
    while waiting:
        inner = waiting.pop()
        with os.scandir(f"{folder}/{inner}") as entries:
            for entry in entries:
                name = inner + entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                elif entry.is_symlink():
                    raise OSError(errno.ELOOP, "an artifact holds no symbolic links", entry.path)
                elif name != MANIFEST:
                    found[name] = entry.stat().st_size
    return found
