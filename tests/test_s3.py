"""Stores at a URL: the same numbers and promises as in a folder, on a real S3 server."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lenspipe
from lenspipe import folders, history, upkeep
from lenspipe.cli.frame import store_of
from lenspipe.errors import DamagedArtifactError, RequestError, StoreError
from lenspipe.folders import copy_of, url_of
from lenspipe.plan import make_plan
from lenspipe.recipe import make_recipe
from lenspipe.storage import owners, remote
from lenspipe.storage.artifacts import ArtifactStore, _payload, _prefix
from lenspipe.storage.manifests import MANIFEST, spelled
from lenspipe.storage.owners import leases
from tests.s3 import SECRET, WEED, server
from tests.storage.test_owners import make_all

pytestmark = pytest.mark.skipif(not WEED.exists(), reason="SeaweedFS has no wheel for this system")
SPAWN = multiprocessing.get_context("spawn")  # obstore's threads do not survive a fork
KEY = "ab" * 32
Values = dict[str, Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture
def url(service: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A store of its own, worked on in a cache of its own."""
    for name, value in {**service, "LENSPIPE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    forget()
    yield f"s3://tests/{tmp_path.name}"
    forget()


def forget() -> None:
    """What a process remembers of places and addresses, which these tests change."""
    remote.remote_behind.cache_clear()
    remote._service.cache_clear()
    remote._listed.clear()


def another_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in another copy from here on, as another host does."""
    monkeypatch.setenv("LENSPIPE_CACHE", str(folder))
    forget()


def publish(store: ArtifactStore, content: bytes = b"content") -> None:
    with store.publish("encode", KEY, {"a": 1}) as draft:
        (draft.folder / "deep").mkdir()
        (draft.folder / "deep" / "a").write_bytes(content)
        draft.attributes["n"] = 3


def objects(store: ArtifactStore, prefix: str = "encode") -> dict[str, int]:
    assert store.remote
    return store.remote.sizes(prefix)


def place_of(store: ArtifactStore, name: str) -> str:
    """The name of the object that holds a file of the artifact."""
    assert store.remote
    manifest = _prefix("encode", KEY) + MANIFEST
    return manifest if name == MANIFEST else _payload("encode", KEY, store.remote.get(manifest) or b"") + name


def test_a_url_has_a_folder_and_a_folder_its_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LENSPIPE_CACHE", str(tmp_path))
    assert url_of(copy_of("s3://bucket/some prefix/é")) == "s3://bucket/some prefix/é"
    assert copy_of("s3://bucket/x/") == copy_of("s3://bucket/x")
    assert url_of(tmp_path / "elsewhere") is None
    with pytest.raises(RequestError, match="too long"):
        copy_of("s3://bucket/" + "x" * 300)


def test_an_artifact_published_here_is_read_elsewhere(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(ArtifactStore(copy_of(url)))
    another_host(monkeypatch, tmp_path / "other")
    store = ArtifactStore(copy_of(url))
    assert store.is_whole("encode", KEY)
    assert store.keys("encode") == [KEY]
    assert store.manifest("encode", KEY).attributes == {"n": 3}  # type: ignore[union-attr]
    assert not store.path("encode", KEY).exists()
    folder, _ = store.open("encode", KEY, checked="")
    assert (folder / "deep" / "a").read_bytes() == b"content"
    assert set(objects(store)) == {place_of(store, name) for name in ("deep/a", MANIFEST)}


def test_an_upload_without_its_manifest_is_no_artifact(url: str) -> None:
    store = ArtifactStore(copy_of(url))
    assert store.remote
    store.remote.put(f"{_prefix('encode', KEY)}0123456789abcdef/deep/a", b"half")
    assert not store.is_whole("encode", KEY)
    assert store.missing_or_damaged("encode", KEY) == "missing"
    publish(store)
    assert (store.open("encode", KEY, checked="")[0] / "deep" / "a").read_bytes() == b"content"


def test_the_second_of_two_artifacts_of_one_key_leaves_the_first_as_it_is(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other processors give other last bits: parts of two results must not mix."""
    publish(ArtifactStore(copy_of(url)), b"first")
    another_host(monkeypatch, tmp_path / "other")
    store = ArtifactStore(copy_of(url))
    publish(store, b"second")
    assert (store.open("encode", KEY, checked="")[0] / "deep" / "a").read_bytes() == b"first"
    assert len(objects(store)) == 2
    assert not store.is_damaged("encode", KEY, deep=True)


def test_what_is_damaged_behind_a_good_copy_is_verified_and_set_aside(url: str) -> None:
    store = ArtifactStore(copy_of(url))
    publish(store)
    assert store.remote
    store.remote.put(place_of(store, "deep/a"), b"contenu")
    assert upkeep.verify(store)["encode"].damaged == []
    assert upkeep.verify(store, deep=True)["encode"].damaged == [KEY]
    assert not store.is_whole("encode", KEY)


@pytest.mark.parametrize("name", ["deep/a", MANIFEST])
@pytest.mark.parametrize("content", [b"contenu", b"", None])
def test_objects_that_are_not_what_was_written_are_set_aside(
    name: str, content: bytes | None, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(ArtifactStore(copy_of(url)))
    another_host(monkeypatch, tmp_path / "other")
    store = ArtifactStore(copy_of(url))
    place = place_of(store, name)
    assert store.remote
    if content is None:
        store.remote.delete(place)
    else:
        store.remote.put(place, content)
        assert store.is_damaged("encode", KEY, deep=True)
    with pytest.raises(DamagedArtifactError, match=r"set aside as s3://|is not in s3://"):
        store.open("encode", KEY)
    assert not store.is_whole("encode", KEY)
    publish(store)
    assert store.open("encode", KEY, checked="")


def test_a_copy_that_is_damaged_is_fetched_again(url: str) -> None:
    store = ArtifactStore(copy_of(url))
    publish(store)
    (store.path("encode", KEY) / "deep" / "a").write_bytes(b"contenu")
    with pytest.raises(DamagedArtifactError):
        store.open("encode", KEY, checked="")
    assert (store.open("encode", KEY, checked="")[0] / "deep" / "a").read_bytes() == b"content"
    (store.path("encode", KEY) / "deep" / "a").unlink()
    assert (store.open("encode", KEY)[0] / "deep" / "a").read_bytes() == b"content"


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_a_manifest_leads_nowhere_outside(name: str, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publish(ArtifactStore(copy_of(url)))
    another_host(monkeypatch, tmp_path / "other")
    store = ArtifactStore(copy_of(url))
    assert store.remote
    place = place_of(store, MANIFEST)
    found = json.loads(store.remote.get(place) or b"")
    found.pop("crc32c")
    store.remote.put(place, spelled({**found, "files": {name: (4, "00000000")}}).encode())
    with pytest.raises(DamagedArtifactError):
        store.open("encode", KEY)
    assert not list(tmp_path.rglob("outside"))


def share(url: str, cache: str, keys: list[str], counts: Any) -> None:
    """Make what is missing of some keys as another host would; tell how many."""
    os.environ["LENSPIPE_CACHE"] = cache
    made: list[str] = []
    make_all(copy_of(url), keys, made)
    counts.put(len(made))


def test_hosts_share_the_work(url: str, tmp_path: Path) -> None:
    keys = [f"{i:02x}" * 32 for i in range(30)]
    counts = SPAWN.Queue()
    hosts = [SPAWN.Process(target=share, args=(url, str(tmp_path / f"host-{n}"), keys, counts)) for n in range(4)]
    for host in hosts:
        host.start()
    made = [counts.get(timeout=200) for _ in hosts]
    for host in hosts:
        host.join()
    assert sum(made) == len(keys)
    store = ArtifactStore(copy_of(url))
    assert store.keys("encode") == sorted(keys)
    assert objects(store, "leases") == {}


def hold(url: str, cache: str, pipe: Any) -> None:
    """Hold a lease, as a process that works in this cache, until it is killed."""
    os.environ["LENSPIPE_CACHE"] = cache
    owners.BEAT = 0.1
    with leases(copy_of(url), [f"encode-{KEY}"]) as mine:
        pipe.send(mine)
        time.sleep(600)


def holder(url: str, cache: Path) -> Any:
    """A process that holds a lease until it is killed."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=hold, args=(url, str(cache), theirs), daemon=True)
    process.start()
    assert ours.recv() == [f"encode-{KEY}"]
    return process


def test_a_host_that_gives_no_signs_blocks_nobody(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = holder(url, tmp_path / "far")
    root = copy_of(url)
    assert owners.is_leased(root, f"encode-{KEY}")
    monkeypatch.setattr(owners, "EXPIRE", 1.5)
    time.sleep(2)
    assert owners.is_leased(root, f"encode-{KEY}")
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    deadline = time.monotonic() + 30
    while owners.is_leased(root, f"encode-{KEY}") and time.monotonic() < deadline:
        time.sleep(0.1)
    with leases(root, [f"encode-{KEY}"]) as mine:
        assert mine == [f"encode-{KEY}"]


def test_a_killed_process_of_this_host_blocks_nobody(url: str, tmp_path: Path) -> None:
    process = holder(url, tmp_path / "cache")
    with leases(copy_of(url), [f"encode-{KEY}"]) as mine:
        assert mine == []
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with leases(copy_of(url), [f"encode-{KEY}"]) as mine:
        assert mine == [f"encode-{KEY}"]
    owners.sweep(copy_of(url))
    assert len(objects(ArtifactStore(copy_of(url)), "owners")) == 1


def test_wrong_credentials_get_one_clear_error_without_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-" + SECRET)
    forget()
    with pytest.raises(
        StoreError, match=r"the store s3://tests/.* cannot be read or written: .*SignatureDoesNotMatch"
    ) as e:
        ArtifactStore(copy_of(url)).require_writable()
    assert SECRET not in str(e.value)


def test_a_server_that_is_gone_gets_one_clear_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setitem(remote.RETRIES, "max_retries", 2)
    forget()
    with pytest.raises(StoreError, match=r"cannot be read or written: .*after 2 retries"):
        ArtifactStore(copy_of(url)).require_writable()


def test_a_url_of_no_service_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LENSPIPE_CACHE", str(tmp_path))
    with pytest.raises(RequestError, match="ftp://somewhere is no place for a store"):
        ArtifactStore(copy_of("ftp://somewhere")).require_writable()


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_a_run_on_s3_gives_the_dataset_of_one_in_a_folder(
    url: str, values: Values, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = lenspipe.open_dataset(lenspipe.run(make_recipe(values))).load()
    far = {**values, "run": {**values["run"], "store": url}}
    said: list[str] = []
    first = lenspipe.open_dataset(lenspipe.run(make_recipe(far), said.append)).load()
    plan = make_plan(make_recipe(far))
    place = f"{ArtifactStore(copy_of(url)).address('assemble', plan.dataset)}/dataset.zarr"
    assert place.startswith(f"{url}/assemble/{plan.dataset[:2]}/{plan.dataset}/")
    assert f"the dataset is at {place}, and here:" in said
    another_host(monkeypatch, tmp_path / "other")
    assert make_plan(make_recipe(far)).is_done
    cached = lenspipe.open_dataset(lenspipe.run(make_recipe(far)))
    by_url = lenspipe.open_dataset(place)
    for name in expected.variables:
        for found in (first, cached, by_url):
            np.testing.assert_array_equal(found[name], expected[name], err_msg=str(name))
    store = store_of(url)
    (record,) = history.records(store.root)
    assert record.state == "finished"
    assert not [item for checked in upkeep.verify(store, deep=True).values() for item in checked.damaged]
    assert upkeep.prune(make_plan(make_recipe(far))).bytes > 1000
    assert objects(store, "capture") == {}
    lenspipe.run(make_recipe({**far, "read": {**far["read"], "top_k": 2}}))
    removed = upkeep.gc(store, ["last"], grace=upkeep.timedelta(0))
    assert {stage for stage, *_ in removed.artifacts} == {"read", "assemble"}
    assert len(history.records(store.root)) == 1


def test_a_folder_of_the_cache_is_not_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LENSPIPE_CACHE", str(tmp_path))
    assert folders.url_of(tmp_path / "stores" / "s3%3A%2F%2Fb") == "s3://b"
    shutil.rmtree(tmp_path, ignore_errors=True)
