"""Artifacts: whole or absent, and set aside when they are no longer what was published."""

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenspipe.errors import DamagedArtifactError, StoreError
from lenspipe.storage import artifacts, disk
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.manifests import MANIFEST
from lenspipe.storage.owners import owner_of

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

KEY = "ab" + "0123456789" * 6 + "cd"
OTHER = "ab" + "9876543210" * 6 + "cd"
PAYLOAD = {"a.bin": b"\x00\x01hello" * 9, "deep/er/b.bin": bytes(range(200)), "empty": b""}
INPUTS = {"model": "m", "layers": [0, 1], "scale": 0.5}


def fill(draft, payload):
    for name, data in payload.items():
        path = draft.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def publish(store, key=KEY, payload=PAYLOAD, **attributes):
    with store.publish("encode", key, INPUTS) as draft:
        fill(draft, payload)
        draft.attributes.update(attributes)


def files_under(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_no_draft(store):
    assert [name for name in files_under(store.root) if not name.startswith("owners/")] == []
    assert list(owner_of(store.root).drafts.iterdir()) == []


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def published(store):
    publish(store, rows=3)
    return store


def assert_set_aside(store, key=KEY):
    assert store.missing_or_damaged("encode", key) == "missing"
    assert not store.path("encode", key).exists()
    (aside,) = (store.root / "damaged").iterdir()
    assert aside.name.startswith(f"encode-{key}-")
    return aside


def test_an_artifact_lies_under_its_stage_and_key(published):
    folder = published.root / "encode" / "ab" / KEY
    assert published.path("encode", KEY) == folder
    assert files_under(folder) == sorted([*PAYLOAD, MANIFEST])
    assert {name: (folder / name).read_bytes() for name in PAYLOAD} == PAYLOAD


def test_a_published_artifact_is_whole_and_opens(published):
    assert published.is_whole("encode", KEY)
    assert published.missing_or_damaged("encode", KEY) is None
    folder, manifest = published.open("encode", KEY, checked="")
    assert folder == published.path("encode", KEY)
    assert manifest == published.manifest("encode", KEY)


def test_the_manifest_accounts_for_everything(published):
    manifest = published.manifest("encode", KEY)
    assert (manifest.stage, manifest.key) == ("encode", KEY)
    assert manifest.inputs == INPUTS
    assert manifest.attributes == {"rows": 3}
    assert manifest.files == {name: (len(data), f"{google_crc32c.value(data):08x}") for name, data in PAYLOAD.items()}
    age = datetime.now(UTC) - manifest.created
    assert abs(age.total_seconds()) < 3600


def test_a_manifest_gives_the_checksum_of_its_other_lines(store):
    publish(store, crc32c="00000000")
    text = (store.path("encode", KEY) / MANIFEST).read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(' "crc32c"')]
    rest = "\n".join(other for other in text.splitlines() if other != line)
    assert line == f' "crc32c": "{google_crc32c.value(rest.encode()):08x}",'
    assert store.is_whole("encode", KEY)


def test_checksums_are_crc32c():
    # RFC 3720, B.4: the checksums of 32 zeros and of 32 bytes counting up.
    assert google_crc32c.value(bytes(32)) == 0x8A9136AA
    assert google_crc32c.value(bytes(range(32))) == 0x46DD794E


def test_an_absent_artifact_is_missing(store):
    assert not store.is_whole("encode", KEY)
    assert store.manifest("encode", KEY) is None
    assert store.missing_or_damaged("encode", KEY) == "missing"
    with pytest.raises(DamagedArtifactError, match=r"encode artifact ab0123456789 is not in .*: run again"):
        store.open("encode", KEY)
    assert not store.root.exists()


def test_stages_and_keys_are_apart(published):
    assert not published.is_whole("capture", KEY)
    assert not published.is_whole("encode", OTHER)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, DamagedArtifactError])
def test_an_error_while_building_leaves_nothing(store, error):
    def build():
        with store.publish("encode", KEY, INPUTS) as draft:
            fill(draft, PAYLOAD)
            raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        build()
    assert store.missing_or_damaged("encode", KEY) == "missing"
    assert_no_draft(store)


def test_an_attribute_that_json_cannot_hold_leaves_nothing(store):
    with pytest.raises(ValueError, match="JSON compliant"):
        publish(store, rows=float("nan"))
    assert_no_draft(store)


def test_nothing_is_under_the_key_while_it_is_built(store):
    with store.publish("encode", KEY, INPUTS) as draft:
        fill(draft, PAYLOAD)
        assert store.missing_or_damaged("encode", KEY) == "missing"
        assert draft.folder.parent == owner_of(store.root).drafts
    assert store.is_whole("encode", KEY)
    assert not draft.folder.exists()


def test_the_second_of_two_artifacts_of_one_key_keeps_the_first(published):
    before = published.manifest("encode", KEY)
    publish(published, payload={"a.bin": b"second"}, rows=4)
    assert published.manifest("encode", KEY) == before
    assert published.open("encode", KEY, checked="")[0].joinpath("a.bin").read_bytes() == PAYLOAD["a.bin"]
    assert files_under(published.root / "encode") == sorted(f"ab/{KEY}/{name}" for name in [*PAYLOAD, MANIFEST])


def test_two_artifacts_of_one_key_may_be_built_at_once(store):
    with store.publish("encode", KEY, INPUTS) as first, store.publish("encode", KEY, INPUTS) as second:
        assert first.folder != second.folder
        fill(first, {"a.bin": b"first"})
        fill(second, {"a.bin": b"second"})
    assert store.open("encode", KEY, checked="")[0].joinpath("a.bin").read_bytes() == b"second"


def test_a_damaged_artifact_gives_way_to_a_new_one(published):
    (published.path("encode", KEY) / "a.bin").unlink()
    publish(published)
    assert published.is_whole("encode", KEY)
    assert len(list((published.root / "damaged").iterdir())) == 1


def truncate(folder):
    (folder / "a.bin").write_bytes(PAYLOAD["a.bin"][:-1])


def lengthen(folder):
    (folder / "empty").write_bytes(b"x")


def remove(folder):
    (folder / "deep/er/b.bin").unlink()


def add(folder):
    (folder / "deep" / "stranger").write_bytes(b"")


def rename(folder):
    (folder / "a.bin").rename(folder / "b.bin")


def remove_manifest(folder):
    (folder / MANIFEST).unlink()


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("damage", [truncate, lengthen, remove, add, rename, remove_manifest, empty])
def test_damage_that_sizes_show_is_noticed_and_set_aside(published, damage):
    damage(published.path("encode", KEY))
    left = files_under(published.path("encode", KEY))
    assert not published.is_whole("encode", KEY)
    assert published.missing_or_damaged("encode", KEY) == "damaged"
    with pytest.raises(DamagedArtifactError, match=r"encode artifact ab0123456789 is damaged; set aside as"):
        published.open("encode", KEY)
    assert files_under(assert_set_aside(published)) == left


def change(values, **changes):
    return json.dumps(values | changes).encode()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values: b"",
        lambda values: b"{",
        lambda values: b"\xff" + json.dumps(values).encode(),
        lambda values: b"[]",
        lambda values: b"null",
        lambda values: change(values, format=2),
        lambda values: change(values, stage="capture"),
        lambda values: change(values, key=OTHER),
        lambda values: change(values, files=list(values["files"])),
        lambda values: change(values, files={"a.bin": 3}),
        lambda values: change(values, files={"a.bin": ["many", "00000000"]}),
        lambda values: change(values, files={}),
        lambda values: json.dumps({n: v for n, v in values.items() if n != "inputs"}).encode(),
        lambda values: json.dumps({n: v for n, v in values.items() if n != "attributes"}).encode(),
        lambda values: json.dumps({n: v for n, v in values.items() if n != "files"}).encode(),
        lambda values: json.dumps({n: v for n, v in values.items() if n != "created"}).encode(),
    ],
)
def test_a_broken_manifest_is_noticed_and_set_aside(published, spoil):
    path = published.path("encode", KEY) / MANIFEST
    path.write_bytes(spoil(json.loads(path.read_bytes())))
    assert published.missing_or_damaged("encode", KEY) == "damaged"
    with pytest.raises(DamagedArtifactError, match="is damaged; set aside"):
        published.open("encode", KEY)
    assert_set_aside(published)


@given(st.sampled_from(["a.bin", "deep/er/b.bin"]), st.integers(0), st.integers(0, 7))
@settings(max_examples=40)
def test_a_flipped_bit_in_the_payload_is_caught_when_opened_deep(tmp_path_factory, name, place, bit):
    store = ArtifactStore(tmp_path_factory.mktemp("flip"))
    publish(store)
    data = bytearray(PAYLOAD[name])
    data[place % len(data)] ^= 1 << bit
    (store.path("encode", KEY) / name).write_bytes(data)
    assert store.is_whole("encode", KEY)
    with pytest.raises(DamagedArtifactError):
        store.open("encode", KEY, checked="")
    assert_set_aside(store)


def test_files_of_one_size_that_changed_places_are_caught_when_opened_deep(store):
    publish(store, payload={"a": b"one", "b": b"two"})
    folder = store.path("encode", KEY)
    (folder / "a").write_bytes(b"two")
    (folder / "b").write_bytes(b"one")
    with pytest.raises(DamagedArtifactError):
        store.open("encode", KEY, checked="")


def test_damaged_artifacts_of_one_key_are_kept_side_by_side(store):
    for n in (1, 2, 3):
        publish(store)
        truncate(store.path("encode", KEY))
        with pytest.raises(DamagedArtifactError):
            store.open("encode", KEY)
        assert len(list((store.root / "damaged").iterdir())) == n


@pytest.mark.parametrize("name", ["a.bin", "extra", "deep/er", MANIFEST])
def test_an_artifact_holds_no_symbolic_links(published, tmp_path, name):
    there = published.path("encode", KEY) / name
    (tmp_path / "outside").write_bytes(there.read_bytes() if there.is_file() else PAYLOAD["a.bin"])
    link = published.path("encode", KEY) / name
    if link.is_dir():
        shutil.move(link, tmp_path / "moved")
        link.symlink_to(tmp_path / "moved")
    else:
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "outside")
    assert not published.is_whole("encode", KEY)
    with pytest.raises(DamagedArtifactError, match="set aside"):
        published.open("encode", KEY)
    assert (tmp_path / "outside").is_file()


def test_everything_is_written_through_to_the_disk_before_an_artifact_appears(store, monkeypatch):
    """In this order: all files and folders of the draft, the rename, the folders above."""
    happened = []
    real_sync, real_rename = disk.sync, Path.rename

    def sync(path):
        happened.append(("sync", Path(path)))
        real_sync(path)

    monkeypatch.setattr(disk, "sync", sync)
    monkeypatch.setattr(artifacts, "sync", sync)

    def rename(self, target):
        happened.append(("rename", self))
        return real_rename(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    publish(store)
    moves = [i for i, (what, path) in enumerate(happened) if what == "rename" and path.name.startswith("encode-")]
    (move,) = moves
    draft = happened[move][1]
    before, after = ({path for what, path in part if what == "sync"} for part in (happened[:move], happened[move:]))
    inside = {draft / name for name in [*PAYLOAD, MANIFEST, "deep", "deep/er"]} | {draft}
    assert inside <= before
    assert {store.root, store.root / "encode"} <= before
    assert store.path("encode", KEY).parent in after


def test_a_folder_that_cannot_be_written_is_a_store_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = ArtifactStore(tmp_path / "file" / "store")
    with pytest.raises(StoreError, match=r"cannot write the encode artifact ab0123456789 under .*: Not a directory"):
        publish(store)
    with pytest.raises(StoreError, match=r"run\.store .* cannot be written: Not a directory"):
        store.require_writable()
    assert store.missing_or_damaged("encode", KEY) == "missing"


def test_a_store_that_is_a_file_is_a_store_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = ArtifactStore(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be written"):
        store.require_writable()
    with pytest.raises(StoreError, match="cannot write the encode artifact"):
        publish(store)


def test_a_store_is_made_where_there_is_none_and_the_probe_leaves_nothing(store):
    store.require_writable()
    assert store.root.is_dir()
    assert list(store.root.iterdir()) == []


def test_a_store_that_was_moved_is_still_whole(published, tmp_path):
    moved = ArtifactStore((published.root).rename(tmp_path / "elsewhere"))
    assert moved.open("encode", KEY, checked="")[1].attributes == {"rows": 3}


def test_a_disk_that_is_full_gives_one_error_and_leaves_no_draft(tmp_path: Path) -> None:
    """A file-size limit makes larger writes fail as a full disk does."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from lenspipe.errors import StoreError; from lenspipe.storage.artifacts import ArtifactStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    with ArtifactStore(Path(sys.argv[1])).publish('read', 'ab12', {}) as draft:\n"
        "        (draft.folder / 'big').write_bytes(bytes(100_000))\n"
        "except StoreError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "cannot write the read artifact ab12" in done.stdout
    assert "finished before is safe" in done.stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "owners"] == []
