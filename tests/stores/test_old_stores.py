"""A store that an earlier version wrote is read by this one."""

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

import lenspipe
from lenspipe import upkeep
from lenspipe.kernels.windows import select_rows
from lenspipe.stages.encode import load_columns, load_tokens
from lenspipe.storage.arrays import open_residual, read_table
from lenspipe.storage.artifacts import ArtifactStore

FOLDER = Path(__file__).parent


@pytest.fixture(params=sorted(path.name for path in FOLDER.glob("*.zip")))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    with zipfile.ZipFile(FOLDER / request.param) as packed:
        packed.extractall(tmp_path)
    return ArtifactStore(tmp_path)


def dataset(store: ArtifactStore) -> Path:
    (key,) = store.keys("assemble")
    return store.path("assemble", key) / "dataset.zarr"


def test_every_artifact_is_what_was_written(store: ArtifactStore) -> None:
    found = upkeep.verify(store, deep=True)
    assert all(checked.artifacts for checked in found.values())
    assert not any(checked.damaged for checked in found.values())


def test_the_dataset_holds_the_numbers_of_the_cells(store: ArtifactStore) -> None:
    ds = lenspipe.open_dataset(dataset(store))
    (encode,) = store.keys("encode")
    rows = select_rows(load_tokens(store, encode), "all")
    assert ds["input_id"].values.tolist() == rows.input_id.tolist()
    assert ds["category"].values.tolist() == load_columns(store, encode)["category"]
    assert ds.sizes["layer"] == len(list(store.keys("read"))) == 2
    for key in store.keys("read"):
        site = store.open("read", key)[1].attributes["site"]
        table = read_table(store, "read", key)
        for name in ("target_rank", "logsumexp", "topk_id", "kl_final"):
            np.testing.assert_array_equal(ds[name].sel(site=site).values[rows.reading_order], table[name])


def test_residuals_are_read_in_their_order(store: ArtifactStore) -> None:
    for key in store.keys("capture"):
        reader = open_residual(store, key)
        n, width = reader.array.shape
        assert np.isfinite(reader.rows(0, n)).all()
        assert width == 32


def test_the_dataset_opens_without_lenspipe(store: ArtifactStore) -> None:
    code = (
        f"import sys, xarray; ds = xarray.open_zarr({str(dataset(store))!r})\n"
        "print(ds.sizes['token'], 'lenspipe' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"
    assert int(done.stdout.split()[0]) > 10


def test_there_is_a_store_of_this_version() -> None:
    assert (FOLDER / f"{version('lenspipe')}.zip").is_file()
