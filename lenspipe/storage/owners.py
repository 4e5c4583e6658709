"""Owner: a process that makes artifacts: its sign of life, its drafts, and its leases on what it is making.

Layout: ROOT/owners/ID is the sign of life, locked by its process and touched every BEAT; ROOT/drafts/ID/ holds what is
being built; ROOT/leases/STAGE-KEY.N is a symbolic link, never followed, to the ID of who is making that artifact. N
counts takeovers: whoever finds the owner of N dead makes N + 1, which only one can. Of a store at a URL, signs are
objects too, and leases are nothing else: written where there is none, which again only one can.
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

from lenspipe.errors import StoreError
from lenspipe.storage.remote import remote_behind

BEAT = 10.0
"""Seconds between two signs of life."""

EXPIRE = 120.0
"""Seconds without a sign, by the watcher's clock, after which an owner counts as dead."""

LONG_AGO = 3600.0
"""Age of a sign, by the clocks of two hosts, that needs no watching."""


class Owner:
    """This process, as an owner in one store."""

    def __init__(self, root: Path) -> None:
        self.id, self._remote = uuid.uuid4().hex, remote_behind(root)
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
        self._give_sign()
        threading.Thread(target=self._live, name="lenspipe-owner", daemon=True).start()
        atexit.register(self._end)

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            with suppress(OSError, StoreError):
                self._give_sign()

    def _give_sign(self) -> None:
        os.utime(self.sign)
        if self._remote:
            self._remote.put(f"owners/{self.id}", f"{time.time()}".encode())

    def _end(self) -> None:
        self._ended.set()
        if os.getpid() == self._process:
            with suppress(OSError, StoreError):
                self.sign.unlink(missing_ok=True)
                if self._remote:
                    self._remote.delete(f"owners/{self.id}")
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
    return [name for name in _names(root, "owners") if not (mine and name == mine.id) and is_alive(root, name)]


_seen: dict[Path, tuple[str, float]] = {}
"""Sign -> what told its last state from others, and when we first saw that, by our own clock."""


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
    except FileNotFoundError:
        stamp = remote.stamp(f"owners/{owner}") if (remote := remote_behind(root)) else None
        return stamp is not None and _gives_signs(sign, *stamp)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return _gives_signs(sign, str(touched), touched / 1e9)


def _gives_signs(sign: Path, stamp: str, written: float) -> bool:
    if sign not in _seen or _seen[sign][0] != stamp:
        _seen[sign] = stamp, time.monotonic()
    return time.monotonic() - _seen[sign][1] < EXPIRE and time.time() - written < LONG_AGO


def _is_unlocked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(handle, fcntl.LOCK_UN)
    return True


def _host() -> str:
    return f"{platform.node()}-{uuid.getnode():x}"


def _names(root: Path, folder: str) -> list[str]:
    """What lies in a folder of the store, or behind it."""
    here = {path.name for path in (root / folder).iterdir()} if (root / folder).is_dir() else set()
    remote = remote_behind(root) if folder != "drafts" else None
    return sorted(here | ({name.removeprefix(f"{folder}/") for name in remote.sizes(folder)} if remote else set()))


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
                _drop(root, f"leases/{name}.{n}")


def held_leases(root: Path) -> list[str]:
    """List the leases that other living owners hold."""
    mine = _owners.get((root, os.getpid()))
    found = {name.rpartition(".")[0] for name in _names(root, "leases")}
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
    lease, mine = f"leases/{name}.{len(holders)}", owner_of(root).id
    if remote := remote_behind(root):
        return len(holders) if remote.put(lease, mine.encode(), new=True) else None
    try:
        (root / "leases").mkdir(parents=True, exist_ok=True)
        (root / lease).symlink_to(mine)
    except FileExistsError:
        return None
    except OSError:  # no symbolic links on this file system: all of it may be made twice
        return -1
    return len(holders)


def _drop(root: Path, name: str) -> None:
    if remote := remote_behind(root):
        remote.delete(name)
    else:
        (root / name).unlink(missing_ok=True)


def _holders(root: Path, name: str) -> list[str]:
    """Who has held the lease on an artifact; the last one holds it."""
    found: list[str] = []
    while (holder := _holder(root, f"leases/{name}.{len(found)}")) is not None:
        found.append(holder)
    return found


def _holder(root: Path, lease: str) -> str | None:
    if remote := remote_behind(root):
        content = remote.get(lease)
        return None if content is None else content.decode(errors="replace").rpartition("/")[2]
    try:
        return (root / lease).readlink().name
    except OSError:  # there is none
        return None


def sweep(root: Path) -> int:
    """Remove what dead owners left: drafts, leases, signs; returns the bytes of the drafts."""
    freed = 0
    for owner in _names(root, "drafts"):
        if not is_alive(root, owner):
            left = root / "drafts" / owner
            freed += sum(path.lstat().st_size for path in left.rglob("*") if not path.is_dir())
            shutil.rmtree(left, ignore_errors=True)
    for name in _names(root, "leases"):
        holder = _holder(root, f"leases/{name}")
        if holder is not None and not is_alive(root, holder):
            _drop(root, f"leases/{name}")
    for owner in _names(root, "owners"):
        if not is_alive(root, owner):
            (root / "owners" / owner).unlink(missing_ok=True)
            if remote := remote_behind(root):
                remote.delete(f"owners/{owner}")
    return freed
