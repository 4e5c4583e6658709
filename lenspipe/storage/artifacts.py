"""Artifact: a finished result under its key, whole or absent.

Layout: ROOT/STAGE/ab/abcdef.../ holds the payload and `manifest.json`, the artifact's account of itself: key, inputs,
attributes, every payload file with its size and CRC-32C, and a CRC-32C of itself. An artifact is built in a draft
folder of its owner (see owners), written through to the disk, and renamed to its place last. Nothing in it is a
symbolic link.
This module knows neither stages nor models.
"""

import hashlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lenspipe.errors import DamagedArtifactError, StoreError
from lenspipe.storage.disk import WRITING, make_folder, sync, sync_tree
from lenspipe.storage.manifests import FORMAT, MANIFEST, Manifest, crc_of, crc_of_bytes, parsed, sizes_of, spelled
from lenspipe.storage.owners import is_leased, leases, owner_of
from lenspipe.storage.remote import Remote, forget, listing, remote_behind

PAUSE = 0.5
"""Seconds between two looks at what another process is making."""

MOST_ATTEMPTS = 10
"""How often work is begun that other processes had claimed and left, before something must be wrong."""


@dataclass(frozen=True, slots=True)
class ArtifactStore:
    """All artifacts under one folder."""

    root: Path

    @property
    def remote(self) -> Remote | None:
        """The objects behind the folder, if the store is at a URL."""
        return remote_behind(self.root)

    def __str__(self) -> str:
        return self.remote.url if self.remote else str(self.root)

    def path(self, stage: str, key: str) -> Path:
        """Where an artifact is, or would be."""
        return Path(self.root, stage, key[:2], key)

    def address(self, stage: str, key: str) -> str:
        """Where anybody finds an artifact's payload: a folder, or a URL."""
        if self.remote is None:
            return str(self.path(stage, key))
        text = self.remote.get(_prefix(stage, key) + MANIFEST) or b""
        return f"{self.remote.url}/{_payload(stage, key, text).rstrip('/')}"

    def look_again(self) -> None:
        """Forget what was seen behind the folder."""
        if self.remote:
            forget(self.remote)

    @classmethod
    def artifact_of(cls, folder: Path) -> "tuple[ArtifactStore, str, str] | None":
        """Find the store, stage and key whose artifact a folder is; None where it lies elsewhere, as a copy may."""
        if len(folder.parents) < 3 or not (folder / MANIFEST).is_file():
            return None
        store, stage, key = cls(folder.parents[2]), folder.parents[1].name, folder.name
        return (store, stage, key) if store.path(stage, key) == folder else None

    def manifest(self, stage: str, key: str) -> Manifest | None:
        """Read an artifact's manifest; None where there is none that can be read."""
        found = self._manifest(stage, key)
        if found is None and self.remote:
            found = parsed(self.remote.get(_prefix(stage, key) + MANIFEST) or b"", stage, key)
        return found

    def _manifest(self, stage: str, key: str) -> Manifest | None:
        try:
            return parsed(Path(self.path(stage, key), MANIFEST).read_bytes(), stage, key)
        except OSError:
            return None

    def _is_here(self, stage: str, key: str) -> bool:
        """Tell whether the folder itself holds an artifact, every file at its size."""
        manifest = self._manifest(stage, key)
        try:
            return manifest is not None and sizes_of(self.path(stage, key)) == {
                name: size for name, (size, _) in manifest.files.items()
            }
        except OSError:
            return False

    def is_whole(self, stage: str, key: str) -> bool:
        """Tell whether an artifact is there: with every file at its size, or at a URL, with a manifest."""
        if self.remote:
            return self.remote.stamp(_prefix(stage, key) + MANIFEST) is not None
        return self._is_here(stage, key)

    def is_damaged(self, stage: str, key: str, deep: bool = False) -> bool:
        """Tell whether an artifact is there and not what was written: by names and sizes, or `deep` by every byte."""
        if self.path(stage, key).exists():
            manifest = self._manifest(stage, key)
            if manifest is None or not self._is_here(stage, key):
                return True
            if deep and self._differs(self.path(stage, key), manifest, ""):
                return True
        return self.remote is not None and self._is_damaged_behind(self.remote, stage, key, deep)

    def _is_damaged_behind(self, remote: Remote, stage: str, key: str, deep: bool) -> bool:
        if (text := remote.get(_prefix(stage, key) + MANIFEST)) is None:
            return False
        manifest, payload = parsed(text, stage, key), _payload(stage, key, text)
        sizes = {name.removeprefix(payload): size for name, size in remote.sizes(payload).items()}
        if manifest is None or sizes != {name: size for name, (size, _) in manifest.files.items()}:
            return True
        files = manifest.files.items()
        return deep and any(crc_of_bytes(remote.get(payload + name) or b"") != crc for name, (_, crc) in files)

    @staticmethod
    def _differs(folder: Path, manifest: Manifest, ending: str) -> bool:
        suspects = [(name, crc) for name, (_, crc) in manifest.files.items() if name.endswith(ending)]
        return any(crc_of(folder / name) != crc for name, crc in suspects)

    def keys(self, stage: str) -> list[str]:
        """List the keys of a stage's artifacts, whole or not."""
        folders = Path(self.root, stage).glob("[0-9a-f][0-9a-f]/*")
        here = {folder.name for folder in folders if folder.name.startswith(folder.parent.name)}
        return sorted(here | (listing(self.remote, stage, MANIFEST).keys() if self.remote else set()))

    def size(self, stage: str, key: str) -> int:
        """Bytes of all files of an artifact, whole or not."""
        if self.remote and (files := listing(self.remote, stage, MANIFEST).get(key)):
            return sum(files.values())
        here = self.path(stage, key).rglob("*")
        return sum(path.lstat().st_size for path in here if path.is_symlink() or not path.is_dir())

    def created(self, stage: str, key: str) -> datetime:
        """When an artifact was published, or last changed where it does not say."""
        manifest = self.manifest(stage, key)
        return manifest.created if manifest else datetime.fromtimestamp(self.path(stage, key).lstat().st_mtime, UTC)

    def remove(self, stage: str, key: str) -> None:
        """Remove an artifact: it is gone in one step, and its bytes soon after."""
        if self.remote:
            self.remote.delete(_prefix(stage, key) + MANIFEST, *self.remote.sizes(_prefix(stage, key)))
            listing(self.remote, stage, MANIFEST).pop(key, None)
        gone = owner_of(self.root).drafts / f"{stage}-{key}-{uuid.uuid4().hex[:8]}"
        with suppress(FileNotFoundError):
            self.path(stage, key).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def missing_or_damaged(self, stage: str, key: str) -> str | None:
        """Classify an artifact for a plan: None if whole, "missing", or "damaged" (there, but not whole)."""
        if self.remote:
            return None if key in listing(self.remote, stage, MANIFEST) else "missing"
        if self._is_here(stage, key):
            return None
        return "damaged" if self.path(stage, key).exists() else "missing"

    def open(self, stage: str, key: str, checked: str | None = None) -> tuple[Path, Manifest]:
        """Find a whole artifact: its folder and manifest.

        Args:
            stage, key: its name.
            checked: compare the CRC-32C of the files whose names end so; "" for all, None for none.

        Raises:
            DamagedArtifactError: it is absent or not whole; what was there has been set aside.
        """
        if self.remote and not self._is_here(stage, key):
            self._fetch(self.remote, stage, key)
        folder, manifest = self.path(stage, key), self._manifest(stage, key)
        if manifest is None or not self._is_here(stage, key):
            raise self.set_aside(stage, key)
        if checked is not None and self._differs(folder, manifest, checked):
            raise self.set_aside(stage, key)
        return folder, manifest

    def _fetch(self, remote: Remote, stage: str, key: str) -> None:
        """Fetch an artifact from behind the folder into it.

        Raises:
            DamagedArtifactError: what is there is not what was written; it has been set aside there.
        """
        if self.path(stage, key).exists():
            self.set_aside(stage, key)
        if (text := remote.get(_prefix(stage, key) + MANIFEST)) is None:
            raise self.set_aside(stage, key)
        manifest = parsed(text, stage, key)
        draft = owner_of(self.root).drafts / f"{stage}-{key}-{uuid.uuid4().hex[:8]}"
        try:
            draft.mkdir(parents=True)
            if manifest and not any(name.startswith("/") or ".." in name.split("/") for name in manifest.files):
                remote.download(_payload(stage, key, text), manifest.files, draft)
                if sizes_of(draft) == {n: size for n, (size, _) in manifest.files.items()}:
                    (draft / MANIFEST).write_bytes(text)
                    if not self._differs(draft, manifest, ""):
                        self._move(draft, self.path(stage, key), stage, key)
                        return
            raise self.set_aside(stage, key)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @contextmanager
    def understood(self, stage: str, key: str) -> Iterator[None]:
        """Set an artifact aside if its block cannot make sense of what is in it.

        Raises:
            DamagedArtifactError: it cannot; with checksums that are right, whoever wrote it was not this program.
        """
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self.set_aside(stage, key) from error

    def set_aside(self, stage: str, key: str) -> DamagedArtifactError:
        """Move a damaged artifact out of the way; returns the error to raise."""
        folder = self.path(stage, key)
        self.look_again()
        if not folder.exists() and self.remote and self.remote.stamp(_prefix(stage, key) + MANIFEST):
            there = f"damaged/{stage}-{key}-{uuid.uuid4().hex[:8]}/"
            self.remote.move(_prefix(stage, key), there, MANIFEST)
            where = f"{self.remote.url}/{there}"
            return DamagedArtifactError(f"{stage} artifact {key[:12]} is damaged; set aside as {where}, to be redone")
        if not folder.exists():
            return DamagedArtifactError(f"{stage} artifact {key[:12]} is not in {self}: run again to redo it")
        aside = self.root / "damaged" / f"{stage}-{key}-{uuid.uuid4().hex[:8]}"
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another run was quicker
                folder.rename(aside)
        except OSError as error:
            if error.errno not in WRITING:
                raise
            return DamagedArtifactError(
                f"{stage} artifact {key[:12]} is damaged and cannot be set aside ({error.strerror}): remove {folder}"
            )
        return DamagedArtifactError(f"{stage} artifact {key[:12]} is damaged; set aside as {aside}, to be redone")

    @contextmanager
    def publish(self, stage: str, key: str, inputs: Mapping[str, Any]) -> Iterator["Draft"]:
        """Build an artifact in a draft folder; it appears under its key, whole, when the block ends without error.

        Raises:
            StoreError: the folder cannot be written, or the disk is full.
        """
        target = self.path(stage, key)
        draft = None
        try:
            try:
                draft = Draft(owner_of(self.root).drafts / f"{stage}-{key}-{uuid.uuid4().hex[:8]}", {})
                draft.folder.mkdir(parents=True)
                yield draft
                manifest = {
                    "format": FORMAT,
                    "stage": stage,
                    "key": key,
                    "inputs": dict(inputs),
                    "attributes": draft.attributes,
                    "files": {
                        n: (size, crc_of(draft.folder / n)) for n, size in sorted(sizes_of(draft.folder).items())
                    },
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                (draft.folder / MANIFEST).write_text(spelled(manifest), encoding="utf-8")
                sync_tree(draft.folder)
                if self.remote is None or self._upload(self.remote, draft.folder, stage, key):
                    self._move(draft.folder, target, stage, key)
            finally:
                if draft:
                    shutil.rmtree(draft.folder, ignore_errors=True)
        except OSError as error:
            if error.errno not in WRITING:
                raise
            raise StoreError(
                f"cannot write the {stage} artifact {key[:12]} under {self.root}: {error.strerror or error}. What was "
                "finished before is safe: make room or permission, and run again"
            ) from error

    def _upload(self, remote: Remote, folder: Path, stage: str, key: str) -> bool:
        """Publish a draft behind the folder; False where another was quicker, whose artifact then counts."""
        text = (folder / MANIFEST).read_bytes()
        payload, names = _payload(stage, key, text), list(sizes_of(folder))
        remote.upload(folder, names, payload)
        self.look_again()
        if remote.put(_prefix(stage, key) + MANIFEST, text, new=True):
            return True
        remote.delete(*(payload + name for name in names))
        return False

    def _move(self, draft: Path, target: Path, stage: str, key: str) -> None:
        make_folder(target.parent)
        try:
            draft.rename(target)
        except OSError:
            if self._is_here(stage, key):  # another run published it; same key, same content
                return
            if target.exists():
                self.set_aside(stage, key)
            draft.rename(target)
        sync(target.parent)

    @contextmanager
    def claim(self, stage: str, keys: Sequence[str]) -> Iterator[list[str]]:
        """Claim those of some artifacts that are not there and that nobody else is making; yields their keys."""
        missing = [key for key in dict.fromkeys(keys) if not self.is_whole(stage, key)]
        with leases(self.root, [f"{stage}-{key}" for key in missing]) as names:
            mine = {name.removeprefix(f"{stage}-") for name in names}
            yield [key for key in missing if key in mine and not self.is_whole(stage, key)]

    def until_whole(self, artifacts: Sequence[tuple[str, str]], make: Callable[[], None]) -> None:
        """Make artifacts, (stage, key), and wait for those that another process is making, until all are there.

        Args:
            artifacts: what is to be there.
            make: makes what is missing and can be claimed; called again when another's claim has ended without result.

        Raises:
            DamagedArtifactError: an artifact was made again and again and is not there.
        """
        for _ in range(MOST_ATTEMPTS):
            make()
            while missing := [name for name in artifacts if not self.is_whole(*name)]:
                if not all(is_leased(self.root, "-".join(name)) for name in missing):
                    break
                time.sleep(PAUSE * (4 if self.remote else 1))
            else:
                return
        raise self.set_aside(*missing[0])

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
            if self.remote:
                self.remote.put(probe.name, b"")
                self.remote.delete(probe.name)
        except OSError as error:
            if error.errno not in WRITING:
                raise
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


def _prefix(stage: str, key: str) -> str:
    """What the names of an artifact's objects begin with."""
    return f"{stage}/{key[:2]}/{key}/"


def _payload(stage: str, key: str, manifest: bytes) -> str:
    """What the names of the objects of its payload begin with."""
    return f"{_prefix(stage, key)}{hashlib.sha256(manifest).hexdigest()[:16]}/"
