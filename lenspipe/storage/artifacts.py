"""Artifact: a finished result under its key, whole or absent.

Layout: ROOT/STAGE/ab/abcdef.../ holds the payload and `manifest.json`, the artifact's account of itself: key, inputs,
attributes, and every payload file with its size and CRC-32C. An artifact is built in a draft folder beside its
place and renamed there last. Results of an engine's own bookkeeping (`prefect-record*`) may lie beside the
payload; they are not part of the artifact. This module knows neither stages nor models.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import google_crc32c

from lenspipe.errors import DamagedArtifactError, StoreError

MANIFEST = "manifest.json"
RECORD = "prefect-record"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """An artifact's account of itself.

    Attributes:
        stage, key: its name.
        inputs: what the key was computed from.
        attributes: facts about the result.
        files: payload file -> (bytes, CRC-32C in hexadecimal).
        created: when, ISO 8601, UTC.
    """

    stage: str
    key: str
    inputs: Mapping[str, Any]
    attributes: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    created: str


@dataclass(frozen=True, slots=True)
class ArtifactStore:
    """All artifacts under one folder."""

    root: Path

    def path(self, stage: str, key: str) -> Path:
        """Where an artifact is, or would be."""
        return self.root / stage / key[:2] / key

    def manifest(self, stage: str, key: str) -> Manifest | None:
        """Read an artifact's manifest; None where there is none that can be read."""
        try:
            values = json.loads((self.path(stage, key) / MANIFEST).read_text(encoding="utf-8"))
            files = {str(name): (int(size), str(crc)) for name, (size, crc) in values["files"].items()}
            if values["format"] != FORMAT or values["stage"] != stage or values["key"] != key:
                return None
            return Manifest(stage, key, values["inputs"], values["attributes"], files, values["created"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def is_whole(self, stage: str, key: str) -> bool:
        """Tell whether an artifact is there with every file at its size."""
        manifest = self.manifest(stage, key)
        return manifest is not None and _sizes(self.path(stage, key)) == {
            name: size for name, (size, _) in manifest.files.items()
        }

    def missing_or_damaged(self, stage: str, key: str) -> str | None:
        """Classify an artifact: None if whole, "missing", or "damaged" (there, but not whole)."""
        if self.is_whole(stage, key):
            return None
        return "damaged" if self.path(stage, key).exists() else "missing"

    def open(self, stage: str, key: str, deep: bool = False) -> tuple[Path, Manifest]:
        """Find a whole artifact: its folder and manifest.

        Args:
            stage, key: its name.
            deep: compare the CRC-32C of every file too.

        Raises:
            DamagedArtifactError: it is absent or not whole; what was there has been set aside.
        """
        folder, manifest = self.path(stage, key), self.manifest(stage, key)
        whole = manifest is not None and self.is_whole(stage, key)
        if (
            manifest is None
            or not whole
            or (deep and any(_crc(folder / n) != crc for n, (_, crc) in manifest.files.items()))
        ):
            raise self.set_aside(stage, key)
        return folder, manifest

    def set_aside(self, stage: str, key: str) -> DamagedArtifactError:
        """Move a damaged artifact out of the way; returns the error to raise."""
        folder = self.path(stage, key)
        if not folder.exists():
            return DamagedArtifactError(f"{stage} artifact {key[:12]} is not in {self.root}: run again to redo it")
        aside = self.root / "damaged" / f"{stage}-{key}-{uuid.uuid4().hex[:8]}"
        aside.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another run was quicker
            folder.rename(aside)
        return DamagedArtifactError(f"{stage} artifact {key[:12]} is damaged; set aside as {aside}, to be redone")

    @contextmanager
    def publish(self, stage: str, key: str, inputs: Mapping[str, Any]) -> Iterator["Draft"]:
        """Build an artifact in a draft folder; it appears under its key, whole, when the block ends without error.

        Raises:
            StoreError: the folder cannot be written, or the disk is full.
        """
        target = self.path(stage, key)
        draft = Draft(target.with_name(f"{key}.partial-{uuid.uuid4().hex}"), {})
        try:
            try:
                draft.folder.mkdir(parents=True)
                yield draft
                manifest = {
                    "format": FORMAT,
                    "stage": stage,
                    "key": key,
                    "inputs": dict(inputs),
                    "attributes": draft.attributes,
                    "files": {n: (size, _crc(draft.folder / n)) for n, size in sorted(_sizes(draft.folder).items())},
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False)
                (draft.folder / MANIFEST).write_text(text, encoding="utf-8")
                _sync_tree(draft.folder)
                self._move(draft.folder, target, stage, key)
            finally:
                shutil.rmtree(draft.folder, ignore_errors=True)
        except OSError as error:
            raise StoreError(
                f"cannot write the {stage} artifact {key[:12]} under {self.root}: {error.strerror or error}. What was "
                "finished before is safe: make room or permission, and run again"
            ) from error

    def _move(self, draft: Path, target: Path, stage: str, key: str) -> None:
        try:
            draft.rename(target)
        except OSError:
            if self.is_whole(stage, key):  # another run published it; same key, same content
                return
            if target.exists():
                self.set_aside(stage, key)
            draft.rename(target)
        _sync(target.parent)

    def require_writable(self) -> None:
        """Make sure that artifacts can be written here.

        Raises:
            StoreError: they cannot, saying why.
        """
        probe = self.root / f".probe-{uuid.uuid4().hex}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise StoreError(f"run.store {self.root} cannot be written: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Draft:
    """An artifact in the making.

    Attributes:
        folder: where its payload is written.
        attributes: facts for the manifest, to be filled in.
    """

    folder: Path
    attributes: dict[str, Any]


def _sizes(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base, name)
            relative = path.relative_to(folder).as_posix()
            if relative != MANIFEST and not relative.startswith(RECORD):
                found[relative] = path.stat().st_size
    return found


def _crc(path: Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum.update(block)
    return str(checksum.hexdigest().decode())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(base, name))
        _sync(Path(base))
