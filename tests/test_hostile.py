"""Hostile: stores, records and recipes that a stranger wrote are used, redone or refused, and never run or crash."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lenspipe
from lenspipe import comparison, history, upkeep
from lenspipe.cli.looking import show
from lenspipe.errors import DamagedArtifactError, LenspipeError, RequestError
from lenspipe.plan import make_plan
from lenspipe.recipe import make_recipe
from lenspipe.storage import manifests
from lenspipe.storage.arrays import TABLE, open_residual, read_table
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.manifests import MANIFEST

Values = dict[str, Any]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["..", "/"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
UNTIMED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield from places(item, (*path, name))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


def forge(folder: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite a manifest with the checksum of its new lines, as a stranger could."""
    manifest = change(json.loads((folder / MANIFEST).read_text()))
    if isinstance(manifest, dict):
        manifest.pop("crc32c", None)
        with suppress(ValueError, TypeError):
            (folder / MANIFEST).write_text(manifests.spelled(manifest))
            return
    (folder / MANIFEST).write_text(json.dumps(manifest))


def reseal(folder: Path) -> None:
    """Make a manifest account for the files as they are now."""

    def change(manifest: Any) -> Any:
        sizes = manifests.sizes_of(folder)
        return {**manifest, "files": {name: (size, manifests.crc_of(folder / name)) for name, size in sizes.items()}}

    forge(folder, change)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Values:
    """A recipe whose store is finished."""
    root = Path(__file__).parents[1]
    values = {
        "model": {"source": str(root / "data/tiny-model")},
        "corpus": {"source": str(root / "data/corpora/recall.jsonl"), "limit": 4, "columns": ["category"]},
        "capture": {"layers": [0, 4]},
        "read": {"top_k": 2, "measures": ["topk", "entropy", "target", "marginal"]},
        "run": {"store": str(tmp_path_factory.mktemp("hostile") / "store"), "device": "cpu"},
    }
    lenspipe.run(make_recipe(values))
    return values


@pytest.fixture
def values(template: Values, tmp_path: Path) -> Iterator[Values]:
    """A copy that may be spoiled."""
    store = tmp_path / "store"
    shutil.copytree(template["run"]["store"], store, symlinks=True)
    yield {**template, "run": {**template["run"], "store": str(store)}}
    shutil.rmtree(store)


def use(values: Values) -> None:
    """All that reads a store and computes nothing."""
    store = ArtifactStore(Path(values["run"]["store"]))
    for stage in upkeep.ALL_STAGES:
        for key in list(store.keys(stage)):
            store.size(stage, key), store.created(stage, key)
    known = history.records(store.root)
    for record in known:
        with suppress(LenspipeError):
            history.keys_of(store.root, record)
        assert isinstance(history.state_of(store.root, record), str)
    with suppress(LenspipeError):
        plan = make_plan(make_recipe(values))
        comparison.explain(plan)
        show(plan.dataset_path)
    with suppress(LenspipeError):
        upkeep.verify(store, deep=True)


@UNTIMED
@given(data=st.data())
def test_any_change_of_a_manifest_is_survived(data: st.DataObject, values: Values, template: Values) -> None:
    store = ArtifactStore(Path(values["run"]["store"]))
    stage = data.draw(st.sampled_from(upkeep.ALL_STAGES))
    key = data.draw(st.sampled_from(sorted(ArtifactStore(Path(template["run"]["store"])).keys(stage))))
    whole, new = ArtifactStore(Path(template["run"]["store"])).path(stage, key), data.draw(JSON)
    shutil.rmtree(store.path(stage, key), ignore_errors=True)
    shutil.copytree(whole, store.path(stage, key))
    manifest = json.loads((whole / MANIFEST).read_text())
    at = data.draw(st.sampled_from(sorted(places(manifest), key=repr)))
    forge(store.path(stage, key), lambda found: replaced(found, at, new))
    use(values)


@UNTIMED
@given(data=st.data())
def test_any_change_of_a_runs_record_is_survived(data: st.DataObject, values: Values, template: Values) -> None:
    name = data.draw(st.sampled_from(["record.json", "keys.json"]))
    whole = next(Path(template["run"]["store"]).glob(f"runs/*/{name}"))
    found = json.loads(whole.read_text())
    at, new = data.draw(st.sampled_from(sorted(places(found), key=repr))), data.draw(JSON)
    path = Path(values["run"]["store"], *whole.parts[-3:])
    path.write_text(json.dumps(replaced(found, at, new)))
    use(values)


@UNTIMED
@given(data=st.data())
def test_any_change_of_a_recipe_is_taken_or_refused(data: st.DataObject, template: Values) -> None:
    at, new = data.draw(st.sampled_from(sorted(places(template), key=repr))), data.draw(JSON)
    changed = replaced(template, at, new)
    try:
        recipe = make_recipe(changed if isinstance(changed, dict) else {"recipe": changed})
    except RequestError:
        return
    assert make_recipe(recipe.as_dict()) is not None


SPOILT = {
    "no arrays": lambda table: {},
    "fewer rows": lambda table: {name: values[:-1] for name, values in table.items()},
    "other types": lambda table: {name: values.astype(np.float64) for name, values in table.items()},
    "other names": lambda table: {f"{name}x": values for name, values in table.items()},
    "another dimension": lambda table: {name: values[..., None] for name, values in table.items()},
    "a bad length": lambda table: {name: values * 3 for name, values in table.items() if values.dtype != bool},
}


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("stage", ["encode", "read"])
def test_a_table_of_a_stranger_is_set_aside_and_made_again(stage: str, spoil: str, values: Values) -> None:
    store, plan = ArtifactStore(Path(values["run"]["store"])), make_plan(make_recipe(values))
    before = lenspipe.open_dataset(plan.dataset_path).load()
    store.remove("assemble", plan.dataset)
    key = plan.shards[0].encode if stage == "encode" else plan.shards[0].cells[0].read
    folder = store.path(stage, key)
    table = SPOILT[spoil](read_table(store, stage, key))
    (folder / TABLE).write_bytes(safetensors.numpy.save({n: np.ascontiguousarray(v) for n, v in table.items()}))
    reseal(folder)
    assert store.is_whole(stage, key)
    said: list[str] = []
    after = lenspipe.open_dataset(lenspipe.run(make_recipe(values), said.append))
    if spoil != "a bad length" or stage == "encode":
        assert any(f"{stage} artifact {key[:12]} is damaged; set aside" in line for line in said), said
        for name in before.variables:
            np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"category": 3}', '{"category": ["a"]}', "[" * 100_000])
def test_columns_of_a_stranger_are_set_aside(text: str, values: Values) -> None:
    store, plan = ArtifactStore(Path(values["run"]["store"])), make_plan(make_recipe(values))
    store.remove("assemble", plan.dataset)
    folder = store.path("encode", plan.shards[0].encode)
    (folder / "columns.json").write_text(text)
    reseal(folder)
    said: list[str] = []
    lenspipe.run(make_recipe(values), said.append)
    assert any("encode artifact" in line and "set aside" in line for line in said)


def test_residuals_of_another_shape_are_set_aside(values: Values) -> None:
    store, plan = ArtifactStore(Path(values["run"]["store"])), make_plan(make_recipe(values))
    key = plan.shards[0].cells[0].capture
    rows, width = open_residual(store, key).array.shape
    with pytest.raises(DamagedArtifactError, match="set aside"):
        open_residual(store, key, (rows + 1, width))


@pytest.mark.parametrize("name", ["../../../outside", "/etc/passwd", "a/../../b"])
def test_a_manifest_names_nothing_outside_its_folder(name: str, values: Values) -> None:
    store, plan = ArtifactStore(Path(values["run"]["store"])), make_plan(make_recipe(values))
    folder = store.path("encode", plan.shards[0].encode)
    forge(folder, lambda found: {**found, "files": {**found["files"], name: (3, "00000000")}})
    assert not store.is_whole("encode", plan.shards[0].encode)
