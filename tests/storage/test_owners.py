"""Owners: who lives is not robbed, who died blocks nobody, and what the dead left is swept."""

import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lenspipe.errors import DamagedArtifactError
from lenspipe.storage import artifacts, owners
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.owners import is_alive, is_leased, leases, live_owners, owner_of, sweep

FORK = multiprocessing.get_context("fork")
NAME = "encode-abc"
HELD = []


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


def started(work, *args):
    """A process that does its work, says so, and lives until it is killed."""
    ours, theirs = FORK.Pipe()

    def run():
        work(*args)
        theirs.send("ready")
        time.sleep(600)

    process = FORK.Process(target=run, daemon=True)
    process.start()
    assert ours.recv() == "ready"
    return process


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def hold(root, name=NAME):
    HELD.append(leases(root, [name]))
    HELD[-1].__enter__()


def foreign(root, touched=0.0):
    """The sign of an owner on a host that our locks do not reach."""
    sign = root / "owners" / "elsewhere"
    sign.parent.mkdir(parents=True, exist_ok=True)
    sign.write_text(json.dumps({"host": "another", "pid": 1}))
    os.utime(sign, (time.time() - touched,) * 2)
    return sign


def test_a_lease_is_held_once_and_ends_with_its_block(root):
    with leases(root, [NAME]) as mine, leases(root, [NAME, "encode-other"]) as others:
        assert (mine, others) == ([NAME], ["encode-other"])
        assert is_leased(root, NAME)
    assert not is_leased(root, NAME)
    assert list((root / "leases").iterdir()) == []


def test_a_lease_ends_when_its_block_fails(root):
    with pytest.raises(KeyError), leases(root, [NAME]):
        raise KeyError
    assert not is_leased(root, NAME)


def test_who_was_killed_blocks_nobody(root):
    process = started(hold, root)
    with leases(root, [NAME]) as mine:
        assert mine == []
    assert len(live_owners(root)) == 1
    kill(process)
    assert live_owners(root) == []
    with leases(root, [NAME]) as mine:
        assert mine == [NAME]


def test_a_forked_process_is_another_owner(root):
    before = owner_of(root).id
    process = started(owner_of, root)
    assert live_owners(root) != [before]
    assert len(live_owners(root)) == 1
    kill(process)


def test_one_alone_takes_over_from_the_dead(root):
    kill(started(hold, root))
    with ThreadPoolExecutor(16) as pool:
        claims = list(pool.map(lambda _: owners._claim(root, NAME), range(64)))
    assert [claim for claim in claims if claim is not None] == [1]


def test_an_owner_that_locks_do_not_reach_lives_as_long_as_it_gives_signs(root, monkeypatch):
    sign = foreign(root)
    monkeypatch.setattr(owners, "EXPIRE", 0.2)
    assert is_alive(root, sign.name)
    for _ in range(4):
        time.sleep(0.1)
        os.utime(sign)
        assert is_alive(root, sign.name)
    time.sleep(0.25)
    assert not is_alive(root, sign.name)
    os.utime(sign)
    assert is_alive(root, sign.name)


def test_a_sign_of_long_ago_needs_no_watching(root):
    assert not is_alive(root, foreign(root, touched=2 * owners.LONG_AGO).name)


def test_a_living_owner_gives_signs(root, monkeypatch):
    monkeypatch.setattr(owners, "BEAT", 0.02)
    sign = owner_of(root).sign
    os.utime(sign, (0, 0))
    deadline = time.monotonic() + 10
    while sign.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sign.stat().st_mtime > 0


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00", '{"host": 3'])
def test_a_sign_that_cannot_be_read_is_no_sign(root, text):
    foreign(root).write_text(text)
    assert not is_alive(root, "elsewhere")


def test_a_sign_is_not_followed_elsewhere(root, tmp_path):
    (tmp_path / "outside").write_text('{"host": "another"}')
    foreign(root).unlink()
    (root / "owners" / "elsewhere").symlink_to(tmp_path / "outside")
    assert not is_alive(root, "elsewhere")


def test_what_the_dead_left_is_swept_and_what_the_living_have_is_not(root):
    def begin():
        hold(root, f"encode-{os.getpid()}")
        (owner_of(root).drafts / "half").mkdir()
        (owner_of(root).drafts / "half" / "file").write_bytes(bytes(1000))

    dead, living = started(begin), started(begin)
    mine = owner_of(root).id
    kill(dead)
    assert sweep(root) == 1000
    for folder in ("owners", "drafts"):
        names = {path.name for path in (root / folder).iterdir()}
        assert mine in names
        assert len(names) == 2
    assert [path.name for path in (root / "leases").iterdir()] == [f"encode-{living.pid}.0"]
    assert sweep(root) == 0
    kill(living)


def test_sweeping_what_is_not_there_is_nothing(root):
    assert sweep(root) == 0
    assert not root.exists()


def test_without_symbolic_links_work_goes_on_without_leases(root, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with leases(root, [NAME]) as mine:
        assert mine == [NAME]


def make_all(root, keys, made):
    """Publish what is missing of some keys, slowly; count what was published here."""
    store = ArtifactStore(root)

    def make():
        for key in keys:
            with store.claim("encode", [key]) as mine:
                if mine:
                    with store.publish("encode", key, {}) as draft:
                        time.sleep(0.005)
                        (draft.folder / "a").write_bytes(key.encode())
                    made.append(key)

    store.until_whole([("encode", key) for key in keys], make)


def test_a_hundred_processes_make_every_artifact_once(root):
    keys = [f"{i:02x}" * 32 for i in range(60)]
    counts = FORK.Queue()

    def work():
        made = []
        make_all(root, keys, made)
        counts.put(len(made))

    workers = [FORK.Process(target=work) for _ in range(100)]
    for worker in workers:
        worker.start()
    assert sum(counts.get(timeout=120) for _ in workers) == len(keys)
    for worker in workers:
        worker.join()
    store = ArtifactStore(root)
    assert all((store.open("encode", key, checked="")[0] / "a").read_text() == key for key in keys)
    assert list((root / "leases").iterdir()) == []


def test_who_waits_takes_over_when_the_maker_dies(root, monkeypatch):
    monkeypatch.setattr(artifacts, "PAUSE", 0.01)
    key = "ab" * 32
    process = started(hold, root, f"encode-{key}")
    made = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make_all, root, [key], made)
        time.sleep(0.2)
        assert not waiting.done()
        kill(process)
        waiting.result(timeout=60)
    assert made == [key]


def test_an_artifact_that_is_never_there_is_an_error_in_the_end(root):
    with pytest.raises(DamagedArtifactError, match="is not in"):
        ArtifactStore(root).until_whole([("encode", "ab" * 32)], lambda: None)
