"""Arrays: they come back bit for bit, or not at all."""

import numpy as np
import pytest
import safetensors.numpy
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from lenspipe.errors import DamagedArtifactError
from lenspipe.storage import arrays
from lenspipe.storage.arrays import RESIDUAL, TABLE, ResidualWriter, open_residual, read_table, write_table
from lenspipe.storage.artifacts import ArtifactStore

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

KEY = "cd" + "0123456789" * 6 + "ab"
ATTRIBUTES = {"site": "resid_post.3", "layer": 4.0, "model": "m"}


def states(n_rows, width, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(0, 3, (n_rows, width)).astype(dtype)


def capture(store, residual, pieces=(), row=None, key=KEY):
    """Publish a residual, appended in pieces that end where `pieces` says."""
    row = np.arange(len(residual))[::-1].copy() if row is None else row
    with store.publish("capture", key, {}) as draft:
        writer = ResidualWriter(draft.folder, row, residual.shape[1], str(residual.dtype), ATTRIBUTES)
        for part in np.split(residual, pieces):
            writer.append(part)
        writer.finish()


def chunk_files(store):
    return sorted(
        path for path in (store.path("capture", KEY) / RESIDUAL / "residual" / "c").rglob("*") if path.is_file()
    )


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 3 rows of 5 float32 numbers."""
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 3 * 5 * 4)


def test_a_table_comes_back_bit_for_bit_with_its_types(store):
    table = {
        "f": states(4, 3),
        "special": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], dtype=np.float32),
        "i": np.array([[-1, 2**31 - 1]], dtype=np.int32),
        "b": np.array([True, False, True]),
        "none": np.zeros((0, 7), dtype=np.int64),
        "columns": np.asfortranarray(states(3, 4)),
        "every second": states(8, 2)[::2],
    }
    with store.publish("encode", KEY, {}) as draft:
        write_table(draft.folder, table)
    found = read_table(store, "encode", KEY)
    assert found.keys() == table.keys()
    for name, values in table.items():
        assert found[name].dtype == values.dtype, name
        assert found[name].shape == values.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(values).tobytes(), name


def test_a_table_is_a_plain_safetensors_file(store):
    with store.publish("encode", KEY, {}) as draft:
        write_table(draft.folder, {"x": np.arange(5, dtype=np.int32)})
    found = safetensors.numpy.load_file(store.path("encode", KEY) / TABLE)
    assert found["x"].tolist() == [0, 1, 2, 3, 4]


@given(st.integers(0), st.integers(0, 7))
@settings(max_examples=40)
def test_a_flipped_bit_anywhere_in_a_table_is_refused(tmp_path_factory, place, bit):
    store = ArtifactStore(tmp_path_factory.mktemp("flip"))
    with store.publish("encode", KEY, {}) as draft:
        write_table(draft.folder, {"x": states(3, 4), "y": np.arange(5)})
    path = store.path("encode", KEY) / TABLE
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(DamagedArtifactError, match="set aside"):
        read_table(store, "encode", KEY)
    assert store.missing_or_damaged("encode", KEY) == "missing"


def test_an_absent_table_is_refused(store):
    with pytest.raises(DamagedArtifactError, match="is not in"):
        read_table(store, "encode", KEY)


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 5), st.data())
@settings(max_examples=40)
def test_residuals_come_back_bit_for_bit_whatever_the_pieces_and_chunks(tmp_path_factory, n_rows, width, rows, data):
    pieces = sorted(data.draw(st.lists(st.integers(0, n_rows), max_size=5)))
    store = ArtifactStore(tmp_path_factory.mktemp("pieces"))
    residual = states(n_rows, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "CHUNK_BYTES", rows * width * 4)
        capture(store, residual, pieces)
    start = data.draw(st.integers(0, n_rows))
    stop = data.draw(st.integers(start, n_rows))
    reader = open_residual(store, KEY)
    assert reader.rows(0, n_rows).tobytes() == residual.tobytes()
    assert reader.rows(start, stop).tobytes() == residual[start:stop].tobytes()
    assert len(chunk_files(store)) == -(-n_rows // min(rows, n_rows))


def test_residuals_of_several_whole_chunks_come_back(store):
    residual = states(2500, 2048)
    capture(store, residual, [1, 1000, 1023, 1025, 2499])
    assert len(chunk_files(store)) == 3  # of 8 MiB, which are 1024 rows
    assert np.array_equal(open_residual(store, KEY).rows(0, 2500), residual)


def test_a_row_wider_than_a_chunk_still_has_one(store, monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 8)
    residual = states(3, 5)
    capture(store, residual, [2])
    assert np.array_equal(open_residual(store, KEY).rows(0, 3), residual)


@pytest.mark.usefixtures("small_chunks")
def test_rows_of_zeros_are_stored_like_others(store):
    residual = np.zeros((7, 5), dtype=np.float32)
    capture(store, residual)
    assert len(chunk_files(store)) == 3
    assert np.array_equal(open_residual(store, KEY).rows(0, 7), residual)
    chunk_files(store)[1].unlink()
    with pytest.raises(DamagedArtifactError):
        open_residual(store, KEY)


def test_no_rows_at_all_are_an_artifact_too(store):
    capture(store, states(0, 5))
    assert open_residual(store, KEY).rows(0, 0).shape == (0, 5)


@pytest.mark.usefixtures("small_chunks")
def test_the_order_of_the_rows_is_stored_beside_them(store):
    row = np.random.default_rng(1).permutation(7)
    capture(store, states(7, 5), row=row)
    group = zarr.open_group(store.path("capture", KEY) / RESIDUAL, mode="r")
    assert group["row"][:].tolist() == row.tolist()
    assert group["row"].dtype == np.int64


@pytest.mark.usefixtures("small_chunks")
def test_residuals_open_with_plain_zarr_and_are_labelled(store):
    residual = states(7, 5)
    capture(store, residual)
    group = zarr.open_group(store.path("capture", KEY) / RESIDUAL, mode="r")
    assert dict(group.attrs) == ATTRIBUTES
    assert group["residual"].metadata.zarr_format == 3
    assert group["residual"].metadata.dimension_names == ("token", "d_model")
    assert group["row"].metadata.dimension_names == ("token",)
    assert group["residual"].chunks == (3, 5)
    assert np.array_equal(group["residual"][:], residual)


def test_a_float16_container_keeps_float16(store):
    residual = states(6, 5, "float16")
    residual[0, :4] = [65504, -65504, 6e-8, -0.0]
    capture(store, residual, [2, 5])
    found = open_residual(store, KEY).rows(0, 6)
    assert found.dtype == np.float16
    assert found.tobytes() == residual.tobytes()


def test_special_numbers_come_back_bit_for_bit(store):
    residual = np.array([[np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38]], dtype=np.float32)
    capture(store, residual)
    assert open_residual(store, KEY).rows(0, 1).tobytes() == residual.tobytes()


@pytest.mark.parametrize("n_appended", [0, 4, 6, 9])
@pytest.mark.usefixtures("small_chunks")
def test_another_number_of_rows_than_announced_is_refused_and_leaves_nothing(store, n_appended):
    def build():
        with store.publish("capture", KEY, {}) as draft:
            writer = ResidualWriter(draft.folder, np.arange(7), 5, "float32", ATTRIBUTES)
            writer.append(states(n_appended, 5))
            writer.finish()

    with pytest.raises(ValueError, match=rf"{n_appended} of 7 rows"):
        build()
    assert store.missing_or_damaged("capture", KEY) == "missing"


@given(st.integers(0, 2), st.integers(0), st.integers(0, 7))
@settings(max_examples=40)
def test_a_flipped_bit_anywhere_in_a_chunk_is_refused_and_set_aside(tmp_path_factory, chunk, place, bit):
    store = ArtifactStore(tmp_path_factory.mktemp("flip"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "CHUNK_BYTES", 3 * 5 * 4)
        capture(store, states(7, 5))
    path = chunk_files(store)[chunk]
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    reader = open_residual(store, KEY)
    with pytest.raises(DamagedArtifactError, match=r"capture artifact cd0123456789 is damaged; set aside"):
        reader.rows(0, 7)
    assert store.missing_or_damaged("capture", KEY) == "missing"
    assert len(list((store.root / "damaged").iterdir())) == 1


@pytest.mark.usefixtures("small_chunks")
def test_a_damaged_chunk_does_not_spoil_rows_of_others(store):
    residual = states(7, 5)
    capture(store, residual)
    path = chunk_files(store)[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    reader = open_residual(store, KEY)
    assert np.array_equal(reader.rows(0, 3), residual[:3])
    with pytest.raises(DamagedArtifactError):
        reader.rows(3, 4)


@pytest.mark.parametrize("name", ["residual/c/1/0", "residual/zarr.json", "zarr.json", "row/c/0"])
@pytest.mark.usefixtures("small_chunks")
def test_a_missing_file_is_refused_and_set_aside(store, name):
    capture(store, states(7, 5))
    (store.path("capture", KEY) / RESIDUAL / name).unlink()
    with pytest.raises(DamagedArtifactError, match="is damaged; set aside"):
        open_residual(store, KEY)
    assert store.missing_or_damaged("capture", KEY) == "missing"


@pytest.mark.usefixtures("small_chunks")
def test_a_truncated_chunk_is_refused_and_set_aside(store):
    capture(store, states(7, 5))
    path = chunk_files(store)[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedArtifactError):
        open_residual(store, KEY)
    assert store.missing_or_damaged("capture", KEY) == "missing"


def test_metadata_that_zarr_cannot_read_is_refused_and_set_aside(store):
    capture(store, states(7, 5))
    path = store.path("capture", KEY) / RESIDUAL / "residual" / "zarr.json"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DamagedArtifactError):
        open_residual(store, KEY)
    assert store.missing_or_damaged("capture", KEY) == "missing"


def test_absent_residuals_are_refused(store):
    with pytest.raises(DamagedArtifactError, match="is not in"):
        open_residual(store, KEY)
