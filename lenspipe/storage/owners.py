"""Owner: a process that makes artifacts: its sign of life, its drafts, and its leases on what it is making.

Layout: ROOT/owners/ID is the sign of life, locked by its process and touched every BEAT; ROOT/drafts/ID/ holds what is
being built; ROOT/leases/STAGE-KEY.N is a symbolic link, never followed, to the ID of who is making that artifact. N
counts takeovers: whoever finds the owner of N dead makes N + 1, which only one can.
A lease saves work and no more: publishing is right without one.
"""

import atexit
import fcntl
import json
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

BEAT = 10.0
"""Seconds between two signs of life."""

EXPIRE = 120.0
"""Seconds without a sign, by the watcher's clock, after which an owner counts as dead."""

LONG_AGO = 3600.0
"""Age of a sign, by the clocks of two hosts, that needs no watching."""


class Owner:
    """This process, as an owner in one store."""

    def __init__(self, root: Path) -> None:
        self.id = uuid.uuid4().hex
        self.sign, self.drafts = root / "owners" / self.id, root / "drafts" / self.id
        self._process, self._ended = os.getpid(), threading.Event()
        for folder in (self.sign.parent, self.drafts):
            folder.mkdir(parents=True, exist_ok=True)
        new = self.drafts / "sign"
        new.write_text(json.dumps({"host": _host(), "pid": os.getpid()}), encoding="utf-8")
        self._handle = os.open(new, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: whoever asks must wait for the signs to end
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.sign)
        threading.Thread(target=self._live, name="lenspipe-owner", daemon=True).start()
        atexit.register(self._end)

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            with suppress(OSError):
                os.utime(self.sign)

    def _end(self) -> None:
        self._ended.set()
        if os.getpid() == self._process:
            with suppress(OSError):
                self.sign.unlink(missing_ok=True)
            shutil.rmtree(self.drafts, ignore_errors=True)


_owners: dict[tuple[Path, int], Owner] = {}
_guard = threading.Lock()


def owner_of(root: Path) -> Owner:
    """This process as an owner in a store; a forked process is another.

    Raises:
        OSError: the store cannot be written.
    """
    with _guard:
        if (root, os.getpid()) not in _owners:
            _owners[root, os.getpid()] = Owner(root)
        return _owners[root, os.getpid()]


def live_owners(root: Path) -> list[str]:
    """List the owners that live, this process apart."""
    mine = _owners.get((root, os.getpid()))
    return [name for name in _names(root / "owners") if not (mine and name == mine.id) and is_alive(root, name)]


_seen: dict[Path, tuple[int, float]] = {}
"""Sign -> when it was last touched, and when we first saw that, by our own clock."""


def is_alive(root: Path, owner: str) -> bool:
    """Tell whether an owner lives: its sign is locked, or, where locks do not reach, was touched while we watched."""
    sign = root / "owners" / owner
    try:
        handle = os.open(sign, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if json.loads(os.read(handle, 4096))["host"] == _host() and _is_unlocked(handle):
                return False
            touched = os.fstat(handle).st_mtime_ns
        finally:
            os.close(handle)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if sign not in _seen or _seen[sign][0] != touched:
        _seen[sign] = touched, time.monotonic()
    return time.monotonic() - _seen[sign][1] < EXPIRE and time.time() - touched / 1e9 < LONG_AGO


def _is_unlocked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(handle, fcntl.LOCK_UN)
    return True


def _host() -> str:
    return f"{platform.node()}-{uuid.getnode():x}"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


@contextmanager
def leases(root: Path, names: Sequence[str]) -> Iterator[list[str]]:
    """Hold leases on those of some artifacts, named STAGE-KEY, that nobody is making; yields their names."""
    numbers = {name: _claim(root, name) for name in names}
    mine = {name: number for name, number in numbers.items() if number is not None}
    try:
        yield list(mine)
    finally:
        for name, number in mine.items():
            for n in reversed(range(number + 1)):
                _link(root, name, n).unlink(missing_ok=True)


def held_leases(root: Path) -> list[str]:
    """List the leases that other living owners hold."""
    mine = _owners.get((root, os.getpid()))
    found = {name.rpartition(".")[0] for name in _names(root / "leases")}
    holders = {name: _holders(root, name)[-1:] for name in found}
    return sorted(
        n for n, last in holders.items() if last and not (mine and last == [mine.id]) and is_alive(root, *last)
    )


def is_leased(root: Path, name: str) -> bool:
    """Tell whether somebody who lives is making an artifact."""
    holders = _holders(root, name)
    return bool(holders) and is_alive(root, holders[-1])


def _claim(root: Path, name: str) -> int | None:
    """Take a lease: how often it was taken over, or None where it is held."""
    holders = _holders(root, name)
    if holders and is_alive(root, holders[-1]):
        return None
    try:
        (root / "leases").mkdir(parents=True, exist_ok=True)
        _link(root, name, len(holders)).symlink_to(owner_of(root).id)
    except FileExistsError:
        return None
    except OSError:  # no symbolic links on this file system: all of it may be made twice
        return -1
    return len(holders)


def _link(root: Path, name: str, number: int) -> Path:
    return root / "leases" / f"{name}.{number}"


def _holders(root: Path, name: str) -> list[str]:
    """Who has held the lease on an artifact; the last one holds it."""
    found: list[str] = []
    with suppress(OSError):  # where they end
        while True:
            found.append(_link(root, name, len(found)).readlink().name)
    return found


def sweep(root: Path) -> int:
    """Remove what dead owners left: drafts, leases, signs; returns the bytes of the drafts."""
    freed = 0
    for owner in _names(root / "drafts"):
        if not is_alive(root, owner):
            left = root / "drafts" / owner
            freed += sum(path.lstat().st_size for path in left.rglob("*") if not path.is_dir())
            shutil.rmtree(left, ignore_errors=True)
    for name in _names(root / "leases"):
        with suppress(OSError):  # it just ended
            if not is_alive(root, (root / "leases" / name).readlink().name):
                (root / "leases" / name).unlink()
    for owner in _names(root / "owners"):
        if not is_alive(root, owner):
            (root / "owners" / owner).unlink(missing_ok=True)
    return freed
