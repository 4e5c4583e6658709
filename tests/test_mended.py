"""Faults once found by attack: each stays mended."""

import os
import resource
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lenspipe.corpora.documents import read_documents
from lenspipe.errors import DamagedArtifactError, RequestError
from lenspipe.grid import select_sites
from lenspipe.kernels.head import Arithmetic, Head, Request
from lenspipe.kernels.readout import read_rows
from lenspipe.keys import canonical_json
from lenspipe.recipe import make_recipe
from lenspipe.storage.arrays import RESIDUAL, ResidualWriter, open_residual
from lenspipe.storage.artifacts import ArtifactStore

BASE = {"model": {"source": "m"}, "corpus": {"source": "a.txt"}}
KEY = "ab" * 32


def docs(folder, source, **corpus):
    return list(
        read_documents(make_recipe({"model": {"source": "m"}, "corpus": {"source": source} | corpus}, base=folder))
    )


def captured(tmp_path):
    store = ArtifactStore(tmp_path / "s")
    with store.publish("capture", KEY, {}) as draft:
        w = ResidualWriter(draft.folder, np.arange(12), 5, "float32", {})
        w.append(np.random.default_rng(0).normal(size=(12, 5)).astype("f4"))
        w.finish()
        draft.attributes["rows"] = 12
    return store, store.path("capture", KEY)


def test_flipped_bit_in_zarr_metadata_gives_no_numbers(tmp_path):
    store, folder = captured(tmp_path)
    path = folder / RESIDUAL / "residual" / "zarr.json"
    text = path.read_text()
    assert '"separator": "/"' in text
    path.write_text(text.replace('"separator": "/"', '"separator": "."'))
    with pytest.raises(DamagedArtifactError):
        open_residual(store, KEY).rows(0, 12)


def test_chunk_that_vanished_after_opening_gives_no_zeros(tmp_path):
    store, folder = captured(tmp_path)
    reader = open_residual(store, KEY)
    (folder / RESIDUAL / "residual/c/0/0").unlink()
    with pytest.raises(DamagedArtifactError):
        reader.rows(0, 12)


def test_flipped_bit_in_manifest_attributes_is_noticed(tmp_path):
    store, folder = captured(tmp_path)
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"rows": 12', '"rows": 13'))
    with pytest.raises(DamagedArtifactError):
        store.open("capture", KEY)


def test_running_out_of_file_handles_does_not_set_a_healthy_artifact_aside(tmp_path):
    store, _ = captured(tmp_path)
    reader = open_residual(store, KEY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            reader.rows(0, 12)
    finally:
        for handle in held:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.is_whole("capture", KEY)


def test_oserror_of_the_block_is_not_a_store_error(tmp_path):
    with pytest.raises(FileNotFoundError), ArtifactStore(tmp_path).publish("encode", KEY, {}):
        (tmp_path / "absent.bin").read_bytes()


def test_kl_final_is_missing_where_the_last_layer_is_broken():
    head, x = Head(torch.randn(7, 4), None, Arithmetic()), torch.randn(2, 2, 4)
    x[1, 0] = float("nan")
    kl = read_rows(head, x, Request(frozenset({"kl_final"}), 1), {}, 1)["kl_final"]
    assert torch.isnan(kl).tolist() == [[True, False]] * 2


def test_a_site_named_in_two_ways_counts_once():
    found = select_sites(["resid_post", "resid_post.1"], None, 3)
    assert len(found) == len(set(found))


def test_a_site_has_one_spelling():
    with pytest.raises(RequestError, match="unknown site"):
        select_sites(["resid_post.01"], None, 3)


def test_long_csv_field(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(docs(tmp_path, "a.csv")[0].content) == 200_000


def test_symlinked_file_keeps_its_name(tmp_path):
    (tmp_path / "blob").write_text("hi")
    (tmp_path / "a.txt").symlink_to("blob")
    assert docs(tmp_path, "a.txt")[0].content == "hi"


def test_glob_in_a_folder_with_brackets(tmp_path):
    d = tmp_path / "run[1]"
    d.mkdir()
    (d / "a.txt").write_text("hi")
    assert docs(d, "*.txt")[0].content == "hi"


def test_parquet_not_utf8(tmp_path):
    off = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    pq.write_table(
        pa.table({"text": pa.Array.from_buffers(pa.string(), 2, [None, off, pa.py_buffer(b"ab\xff\xfe")])}),
        tmp_path / "a.parquet",
    )
    with pytest.raises(RequestError):
        docs(tmp_path, "a.parquet")


def test_huge_int_in_json(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text":"a","n":' + "9" * 5000 + "}\n")
    with pytest.raises(RequestError):
        docs(tmp_path, "a.jsonl")


def test_messages_with_nan_or_time(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"m":[{"role":"u","content":"hi","w":NaN}]}\n')
    with pytest.raises(RequestError, match="line 1"):
        docs(tmp_path, "a.jsonl", messages="m")


def test_lone_surrogate(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text":"\\ud83d hi"}\n')
    with pytest.raises(RequestError, match="line 1"):
        docs(tmp_path, "a.jsonl")


def test_duplicate_csv_header(tmp_path):
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(RequestError):
        docs(tmp_path, "a.csv")


def test_nan_and_its_name_have_two_digests(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text":"a","n":NaN}\n{"text":"a","n":"nan"}\n')
    a, b = docs(tmp_path, "a.jsonl", columns=["n"])
    assert a.column_digest != b.column_digest


def test_empty_hub():
    with pytest.raises(RequestError):
        make_recipe({"model": {"source": "m"}, "corpus": {"hub": ""}})


@pytest.mark.parametrize("name", ["int", "str", "a[0]"])
def test_unknown_group_of_any_name(name):
    with pytest.raises(RequestError, match="unknown name"):
        make_recipe(BASE | {name: 1})


@pytest.mark.parametrize("name", ["int", "str", "a[0]"])
def test_unknown_key_of_any_name(name):
    with pytest.raises(RequestError) as found:
        make_recipe(BASE | {"read": {name: 1}})
    assert f"read.{name}: unknown name" in str(found.value)


def test_base_is_unknown():
    with pytest.raises(RequestError):
        make_recipe(BASE | {"base": "/x"})


def test_huge_memory():
    with pytest.raises(RequestError):
        make_recipe(BASE | {"run": {"memory": "9" * 400}})


def test_unknown_home():
    with pytest.raises(RequestError, match="nosuchuser"):
        make_recipe(BASE | {"run": {"store": "~nosuchuser/x"}}).path("~nosuchuser/x")


def test_text_that_is_not_unicode_has_no_spelling():
    with pytest.raises(ValueError, match="surrogates"):
        canonical_json("\ud83d\ude00")


def test_entropy_precision():
    L = torch.rand(16, 50000, generator=torch.Generator().manual_seed(1)) * 10 + 180
    head = Head(L.T.contiguous(), None, Arithmetic())
    e = read_rows(head, torch.eye(16)[None], Request(frozenset({"entropy"}), 1), {})["entropy"][0]
    q = torch.log_softmax(L.double(), 1)
    assert (e + (q.exp() * q).sum(1)).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(3, 1), (4,)])
def test_residual_of_another_width(tmp_path, shape):
    writer = ResidualWriter(tmp_path, np.arange(4), 4, "float32", {})
    with pytest.raises(ValueError, match="expected \\(4,\\)"):
        writer.append(np.ones(shape))
