"""History and upkeep: what a store knows of its runs, and what may be removed from it."""

import json
import os
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lenspipe
from lenspipe import comparison, history, provenance, upkeep
from lenspipe.comparison import StageReason, changes, explain
from lenspipe.errors import DamagedArtifactError, RequestError, StoreError
from lenspipe.history import Record, find, keys_of, records, state_of
from lenspipe.plan import Plan, make_plan
from lenspipe.recipe import make_recipe
from lenspipe.stages.work import STAGES
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.owners import leases

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]
Values = dict[str, Any]
NOW = timedelta(0)


def run(values: Values, **settings: Any) -> Path:
    return lenspipe.run(make_recipe(changed(values, **settings)))


def plan(values: Values, **settings: Any) -> Plan:
    return make_plan(make_recipe(changed(values, **settings)))


def changed(values: Values, **settings: Any) -> Values:
    values = deepcopy(values)
    for name, value in settings.items():
        group, field = name.split("__")
        values.setdefault(group, {})[field] = value
    return values


def store_of(values: Values) -> ArtifactStore:
    return ArtifactStore(Path(values["run"]["store"]))


def keys(store: ArtifactStore) -> dict[str, set[str]]:
    return {stage: set(store.keys(stage)) for stage in upkeep.ALL_STAGES}


def why(values: Values, **settings: Any) -> dict[str, StageReason]:
    return {reason.stage: reason for reason in explain(plan(values, **settings))[1]}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture
def finished(values: Values) -> Values:
    run(values)
    return values


def test_a_run_is_recorded_with_what_it_was_asked_and_what_it_made(finished: Values) -> None:
    store = store_of(finished)
    (record,) = records(store.root)
    planned = plan(finished)
    assert (record.state, record.dataset, record.corpus) == ("finished", planned.dataset, planned.corpus)
    assert record.recipe == planned.recipe.as_dict()
    assert record.rows == lenspipe.open_dataset(planned.dataset_path).sizes["token"]
    assert record.todo == {"encode": 4, "capture": 20, "read": 20, "assemble": 1}
    held, needed = keys(store), keys_of(store.root, record)
    assert {stage: set(needed[stage]) for stage in STAGES} == {stage: held[stage] for stage in STAGES}


def test_a_cached_run_is_recorded_once_where_no_run_is_known(finished: Values) -> None:
    run(finished)
    root = store_of(finished).root
    assert len(records(root)) == 1
    for path in (root / "runs").rglob("*.json"):
        path.unlink()
    run(finished)
    run(finished)
    (record,) = records(root)
    assert record.state == "finished"
    assert set(record.todo.values()) == {0}


def test_a_run_that_fails_is_recorded_with_its_error(values: Values) -> None:
    bad = changed(values, read__tracked=["no such token, surely"])
    with pytest.raises(RequestError):
        run(bad)
    (record,) = records(store_of(values).root)
    assert record.state == "failed"
    assert "no such token" in record.error


def test_a_run_whose_process_died_is_called_killed(finished: Values) -> None:
    root = store_of(finished).root
    (record,) = records(root)
    path = root / "runs" / record.id / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": "running", "owner": "0" * 32}))
    assert state_of(root, records(root)[0]) == "killed"


def test_a_run_is_found_by_the_beginning_of_its_id(finished: Values) -> None:
    run(finished, read__top_k=2)
    root = store_of(finished).root
    first, second = records(root)
    assert find(root, first.id) == first
    assert find(root, "last") == second
    with pytest.raises(RequestError, match=rf"2 runs of .* begin with '20'; known are {first.id}, {second.id}"):
        find(root, "20")
    with pytest.raises(RequestError, match=r"no runs of .* begin with 'x'"):
        find(root, "x")


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"id": 3}', "\x00", '{"id": NaN}'])
def test_a_record_that_cannot_be_read_is_passed_over(finished: Values, text: str) -> None:
    root = store_of(finished).root
    (root / "runs" / "strange").mkdir()
    (root / "runs" / "strange" / "record.json").write_text(text)
    assert len(records(root)) == 1


def test_credentials_in_a_url_are_written_nowhere(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = changed(values, run__address="tcp://user:hunter2@localhost:1")
    path = run(secret)
    root = store_of(values).root
    files = [found for found in root.rglob("*") if found.is_file()]
    assert len(files) > 50
    assert not [found for found in files if b"hunter2" in found.read_bytes()]
    assert "***@localhost" in lenspipe.open_dataset(path).attrs["recipe"]
    assert str(StoreError("no answer from https://me:hunter2@host/x")) == "no answer from https://***@host/x"


def test_explain_names_the_input_that_changed(finished: Values) -> None:
    assert all(not reason.todo and not reason.changed and not reason.causes for reason in why(finished).values())
    found = why(finished, corpus__bos="never")
    assert found["encode"].changed == [("bos", "auto", "never")]
    assert found["capture"].causes[0] == "rests on encode, which changed"
    found = why(finished, read__top_k=2)
    assert (found["encode"].todo, found["capture"].todo) == (0, 0)
    assert found["read"].changed == [("top_k", 4, 2)]
    found = why(finished, corpus__limit=13)
    assert found["encode"].causes == ["1 of 4 shards hold documents that are new, changed or cut otherwise"]
    assert found["capture"].changed == []


def test_explain_names_new_sites_and_what_is_gone(finished: Values) -> None:
    store, planned = store_of(finished), plan(finished)
    found = why(finished, capture__sites=["resid_mid", "resid_post"])
    assert found["capture"].causes == ["4 sites are new: resid_mid.0, resid_mid.1, resid_mid.2, resid_mid.3"]
    store.remove("read", planned.shards[0].cells[0].read)
    store.remove("assemble", planned.dataset)
    (record,) = records(store.root)
    assert why(finished)["read"].causes == [f"1 that run {record.id} needed are no longer there"]


def test_explain_compares_with_the_run_that_is_nearest(finished: Values) -> None:
    run(finished, corpus__bos="never", read__top_k=2)
    earlier, reasons = explain(plan(finished, read__top_k=3))
    assert earlier == records(store_of(finished).root)[0]
    assert [reason.stage for reason in reasons if reason.changed] == ["read"]


def test_explain_without_a_run_has_nothing_to_compare_with(values: Values) -> None:
    assert explain(plan(values))[0] is None


def test_changes_are_named_by_their_place() -> None:
    before = {"a": 1, "b": {"c": [1], "d": 2}, "gone": 0}
    now = {"a": 1, "b": {"c": [2], "d": 2}, "new": None}
    assert changes(before, now) == [("b.c", [1], [2]), ("gone", 0, "(none)"), ("new", "(none)", None)]


def compared(values: Values) -> comparison.RunDifference:
    root = store_of(values).root
    return comparison.diff(root, *records(root)[-2:])


def test_diff_of_runs_that_differ_in_top_k_finds_equal_numbers(finished: Values) -> None:
    run(finished, read__top_k=2)
    found = compared(finished)
    assert found.recipe == [("read.top_k", 4, 2)]
    assert found.rows[0] == found.rows[1] == found.rows[2]
    assert {difference.differ for difference in found.numbers} == {0}
    assert {difference.name for difference in found.numbers} >= {"topk_id", "entropy", "target_rank"}


def test_diff_gives_the_largest_difference_at_the_rows_and_layers_that_both_have(
    values: Values, write_corpus: Callable[..., str]
) -> None:
    texts = ["the cat sat", "a dog ran far", "one more"]
    base = changed(values, corpus__columns=[], read__answer=None)
    a = run(changed(base, corpus__source=write_corpus(texts, "a.jsonl")), capture__layers=[0, 2, 4])
    reordered = changed(base, corpus__source=write_corpus(["new", texts[2], texts[0]], "b.jsonl"))
    b = run(reordered, capture__layers=[2, 3, 4], model__dtype="bfloat16")
    one, other = lenspipe.open_dataset(a), lenspipe.open_dataset(b)
    found = compared(values)
    rows_a = np.concatenate([np.flatnonzero(one.document == 0), np.flatnonzero(one.document == 2)])
    rows_b = np.concatenate([np.flatnonzero(other.document == 2), np.flatnonzero(other.document == 1)])
    assert found.rows == (len(rows_a), one.sizes["token"], other.sizes["token"])
    gap = one.entropy.sel(layer=[2, 4]).values[:, rows_a] - other.entropy.sel(layer=[2, 4]).values[:, rows_b]
    (entropy,) = (difference for difference in found.numbers if difference.name == "entropy")
    assert entropy.largest == pytest.approx(np.abs(gap).max(), rel=1e-6)
    assert (entropy.values, entropy.differ) == (gap.size, np.count_nonzero(gap))
    assert entropy.largest > 0


def test_what_was_exported_can_be_reproduced_elsewhere(finished: Values, tmp_path: Path) -> None:
    root = store_of(finished).root
    exported = json.loads(json.dumps(provenance.export(root, find(root, "last"))))
    path = tmp_path / "provenance.json"
    path.write_text(json.dumps(exported))
    recipe = provenance.recipe_of(provenance.load(path), str(tmp_path / "elsewhere"))
    found = provenance.compare(exported, recipe, lenspipe.run(recipe))
    assert (found.inputs, found.environment, found.close, found.other) == ([], [], [], [])
    assert set(found.same) == set(exported["numbers"])
    assert Path(recipe.store).name == "elsewhere"


def test_a_reproduction_that_differs_says_where(finished: Values, tmp_path: Path) -> None:
    root = store_of(finished).root
    exported = provenance.export(root, find(root, "last"))
    recipe = provenance.recipe_of(exported, str(tmp_path / "elsewhere"), ["model.dtype=bfloat16"])
    found = provenance.compare(exported, recipe, lenspipe.run(recipe))
    assert ("capture.dtype", "float32", "bfloat16") in found.inputs
    assert "entropy" in {name for name, *_ in found.other}
    assert "input_id" in found.same


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "recipe": 3}', "[" * 100_000])
def test_what_is_no_provenance_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(RequestError, match="is no provenance"):
        provenance.load(tmp_path / "p.json")


def test_a_run_without_a_dataset_cannot_be_exported(finished: Values) -> None:
    store = store_of(finished)
    (record,) = records(store.root)
    store.remove("assemble", record.dataset)
    with pytest.raises(RequestError, match="has no dataset"):
        provenance.export(store.root, record)


def test_a_whole_store_is_verified_as_such(finished: Values) -> None:
    found = upkeep.verify(store_of(finished), deep=True)
    assert {stage: checked.artifacts for stage, checked in found.items()} == {
        "cut": 1, "sample": 2, "encode": 4, "capture": 20, "read": 20, "assemble": 1,
    }  # fmt: skip
    assert not any(checked.damaged for checked in found.values())
    for stage, checked in found.items():
        files = [path for path in (store_of(finished).root / stage).rglob("*") if path.is_file()]
        assert checked.bytes == sum(path.stat().st_size for path in files)


def test_damage_is_verified_set_aside_and_made_good_by_the_next_run(finished: Values) -> None:
    store, planned = store_of(finished), plan(finished)
    before = lenspipe.open_dataset(planned.dataset_path).load()
    chunk = next(path for path in (planned.dataset_path / "entropy").rglob("0") if path.is_file())
    flip(chunk)
    flip(store.path("read", planned.shards[1].cells[0].read) / "arrays.safetensors")
    (store.path("encode", planned.shards[0].encode) / "columns.json").write_text("")
    assert {stage: len(found.damaged) for stage, found in upkeep.verify(store).items() if found.damaged} == {
        "encode": 1
    }
    deep = upkeep.verify(store, deep=True)
    assert {stage: len(found.damaged) for stage, found in deep.items() if found.damaged} == {"read": 1, "assemble": 1}
    assert {stage: todo for stage, _, todo in plan(finished).counts()} == {
        "encode": 1, "capture": 0, "read": 1, "assemble": 1,
    }  # fmt: skip
    after = lenspipe.open_dataset(run(finished))
    for name in before.variables:
        np.testing.assert_array_equal(before[name], after[name])


def test_a_dataset_that_is_not_what_was_written_is_not_opened(finished: Values) -> None:
    path = plan(finished).dataset_path
    flip(path / "entropy" / "zarr.json")
    with pytest.raises(DamagedArtifactError, match=r"assemble artifact .* is damaged; set aside"):
        lenspipe.open_dataset(path)
    assert not path.exists()
    run(finished)
    next(found for found in (path / "entropy").rglob("0") if found.is_file()).unlink()
    with pytest.raises(DamagedArtifactError):
        lenspipe.open_dataset(path)


def test_gc_keeps_what_recorded_runs_need(finished: Values) -> None:
    run(finished, read__top_k=2)
    store = store_of(finished)
    before = keys(store)
    assert upkeep.gc(store, grace=NOW).artifacts == []
    assert keys(store) == before


def test_gc_removes_what_only_other_runs_need(finished: Values) -> None:
    run(finished, read__top_k=2)
    store = store_of(finished)
    first, second = records(store.root)
    dry = upkeep.gc(store, [second.id], NOW, dry=True)
    assert len(records(store.root)) == 2
    removed = upkeep.gc(store, [second.id], NOW)
    assert (removed.artifacts, removed.runs, removed.bytes) == (dry.artifacts, [first.id], dry.bytes)
    assert {stage for stage, *_ in removed.artifacts} == {"read", "assemble"}
    assert records(store.root) == [second]
    assert plan(finished, read__top_k=2).is_done
    assert [todo for *_, todo in plan(finished).counts()] == [0, 0, 20, 1]


def test_gc_leaves_what_is_younger_than_the_grace_period(finished: Values) -> None:
    run(finished, read__top_k=2)
    store = store_of(finished)
    before = keys(store)
    found = upkeep.gc(store, ["last"])
    assert (found.artifacts, found.recent) == ([], 21)
    assert keys(store) == before


def test_gc_of_a_store_without_records_is_refused(finished: Values) -> None:
    store = store_of(finished)
    for path in (store.root / "runs").rglob("*.json"):
        path.unlink()
    with pytest.raises(RequestError, match="no run is recorded"):
        upkeep.gc(store, grace=NOW)


def test_nothing_is_removed_under_a_run_in_progress(finished: Values) -> None:
    store = store_of(finished)
    before = keys(store)
    with history.recorded(plan(finished, read__top_k=2)):
        with pytest.raises(StoreError, match=r"run .* is at work in"):
            upkeep.gc(store, grace=NOW)
        with pytest.raises(StoreError, match=r"run .* is at work in"):
            upkeep.prune(plan(finished))
    with leases(store.root, [history.REMOVAL]), pytest.raises(StoreError, match="another process is at work"):
        upkeep.gc(store, grace=NOW)
    assert keys(store) == before


def test_gc_sweeps_what_was_set_aside(finished: Values) -> None:
    store = store_of(finished)
    store.set_aside("read", plan(finished).shards[0].cells[0].read)
    found = upkeep.gc(store, grace=NOW)
    assert found.left > 100
    assert not (store.root / "damaged").exists()


def test_prune_removes_residuals_and_leaves_the_rest(finished: Values) -> None:
    store = store_of(finished)
    before = keys(store)
    assert len(upkeep.prune(plan(finished), dry=True).artifacts) == 20
    assert keys(store) == before
    assert len(upkeep.prune(plan(finished)).artifacts) == 20
    assert keys(store) == {**before, "capture": set()}
    assert plan(finished, capture__residuals="stream").is_done


def test_prune_of_what_is_not_finished_is_refused(finished: Values) -> None:
    with pytest.raises(RequestError, match="is not finished"):
        upkeep.prune(plan(finished, read__top_k=2))


def test_a_cached_run_on_a_store_that_cannot_be_written_gives_its_path(
    finished: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here as root, who may write anywhere, the store is told so."""
    root = store_of(finished).root
    for path in (root / "runs").rglob("*.json"):
        path.unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    assert run(finished) == plan(finished).dataset_path
    assert records(root) == []


def test_a_record_names_the_machine_and_the_versions() -> None:
    found = history.environment()
    assert found["torch"]
    assert int(found["cores"]) >= 1
    assert os.name


def test_the_plan_expects_the_time_of_an_earlier_run(finished: Values) -> None:
    root = store_of(finished).root
    (record,) = records(root)
    assert isinstance(record, Record)
    again = plan(finished, read__top_k=2)
    expected = history.seconds_expected(again)
    assert expected == (again.work() * record.seconds / record.work, record.id)
    assert history.seconds_expected(plan(finished, model__dtype="bfloat16")) == expected
