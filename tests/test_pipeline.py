"""The pipeline on a real Prefect server: what is computed, what is redone, and what is not."""

import gzip
import json
import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import xarray as xr

import lenspipe
from lenspipe.analysis import layer_table
from lenspipe.cli.looking import show
from lenspipe.corpora.documents import read_documents
from lenspipe.errors import DamagedArtifactError, ModelError, NonFiniteError, RequestError
from lenspipe.keys import artifact_key
from lenspipe.models.facts import read_facts
from lenspipe.models.lens_model import load_model
from lenspipe.models.structure import probe_ids
from lenspipe.plan import make_plan
from lenspipe.recipe import make_recipe
from lenspipe.stages.sample import hold_model
from lenspipe.stages.work import VERSION
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.upkeep import ALL_STAGES
from tests.conftest import ROOT

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]
Values = dict[str, Any]


def run(values: Values) -> xr.Dataset:
    return lenspipe.open_dataset(lenspipe.run(make_recipe(values)))


def changed(values: Values, **settings: Any) -> Values:
    """A copy with settings such as read__top_k=3."""
    values = deepcopy(values)
    for name, value in settings.items():
        group, field = name.split("__")
        values.setdefault(group, {})[field] = value
    return values


def todo(values: Values) -> dict[str, int]:
    return {stage: n for stage, _, n in make_plan(make_recipe(values)).counts()}


def assert_same(left: xr.Dataset, right: xr.Dataset) -> None:
    assert set(left.variables) == set(right.variables)
    for name in left.variables:
        np.testing.assert_array_equal(left[name].values, right[name].values, err_msg=str(name))


def test_the_dataset_holds_what_a_plain_loop_over_the_model_computes(values: Values) -> None:
    """Every readout again, from transformers' own hidden states, in float64, one text at a time."""
    ds = run(values)
    folder = values["model"]["source"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = [json.loads(line) for line in Path(values["corpus"]["source"]).read_text().splitlines()][:12]
    weight = model.lm_head.weight.detach().double()
    tracked = [tokenizer.encode(" the", add_special_tokens=False)[0], 300]
    assert ds.sizes == {"layer": 5, "token": ds.sizes["token"], "k": 4, "tracked": 2, "document": 12, "vocab": 384}
    assert ds["tracked_id"].values.tolist() == tracked
    for number, line in enumerate(lines):
        ids = tokenizer(line["text"], return_tensors="pt").input_ids
        doc = ds.lens.doc(number)
        assert doc["input_id"].values.tolist() == ids[0].tolist()
        assert doc["category"].item() == line["category"]
        entering: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, args, held=entering: held.append(args[0]))
        with torch.no_grad():
            states = list(model(ids, output_hidden_states=True).hidden_states)
        hook.remove()
        states[-1] = entering[0]
        answer = tokenizer.encode(" " + line["answer"], add_special_tokens=False)
        assert (doc["answer_id"].item(), doc["answer_length"].item()) == (answer[0], len(answer))
        final = None
        for layer in reversed(range(5)):
            with torch.no_grad():
                z = (model.model.norm(states[layer])[0].double() @ weight.T).numpy()
            log_p = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)) - z.max(1, keepdims=True)
            final = log_p if final is None else final
            at = doc.sel(layer=layer)
            rows = np.arange(len(z))
            np.testing.assert_array_equal(at["topk_id"], np.argsort(-z, axis=1, kind="stable")[:, :4])
            np.testing.assert_allclose(at["topk_logit"], -np.sort(-z, axis=1)[:, :4], atol=1e-4)
            np.testing.assert_allclose(at["entropy"], -(np.exp(log_p) * log_p).sum(1), atol=1e-4)
            np.testing.assert_allclose(at["logsumexp"], (z - log_p)[:, 0], atol=1e-4)
            np.testing.assert_allclose(at["kl_final"], (np.exp(final) * (final - log_p)).sum(1), atol=1e-4)
            after = ids[0, 1:].numpy()
            np.testing.assert_array_equal(at["target_id"], [*after, -1])
            chosen = z[rows[:-1], after]
            np.testing.assert_array_equal(at["target_rank"], [*(z[:-1] > chosen[:, None]).sum(1), -1])
            np.testing.assert_allclose(at["target_logit"], [*chosen, np.nan], atol=1e-4)
            np.testing.assert_array_equal(at["answer_rank"], (z > z[:, answer[:1]]).sum(1))
            np.testing.assert_array_equal(at["tracked_rank"], np.stack([(z > z[:, [i]]).sum(1) for i in tracked], 1))
            np.testing.assert_allclose(at["tracked_logit"], z[:, tracked], atol=1e-4)


def test_a_second_run_has_nothing_to_do_and_gives_the_same_path(values: Values) -> None:
    first = lenspipe.run(make_recipe(values))
    assert todo(values) == {"encode": 0, "capture": 0, "read": 0, "assemble": 0}

    def files() -> dict[Path, int]:
        found = Path(values["run"]["store"]).rglob("*")
        return {path: path.stat().st_mtime_ns for path in found if path.is_file() and path.parent.name != "owners"}

    before = files()
    assert lenspipe.run(make_recipe(values)) == first
    assert before == files()


def test_a_run_reads_the_corpus_once_to_plan_it(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr("lenspipe.plan.read_documents", lambda recipe: read.append("once") or read_documents(recipe))
    lenspipe.run(make_recipe(values))
    assert read == ["once"]
    lenspipe.run(make_recipe(values))
    assert read == ["once", "once"]


def test_a_cached_run_is_recorded_on_a_named_server_and_submits_no_task(
    values: Values, write_corpus: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client  # noqa: PLC0415 -- after the server's settings
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName  # noqa: PLC0415
    from prefect.settings import PREFECT_API_URL  # noqa: PLC0415

    asked = {**values, "corpus": {"source": write_corpus(["One text."], "recorded.jsonl")}, "read": {}}
    named = FlowRunFilter(name=FlowRunFilterName(any_=["tiny-model on recorded.jsonl"]))

    def recorded() -> list[str]:
        with get_client(sync_client=True) as client:
            return [run.state_name for run in client.read_flow_runs(flow_run_filter=named)]

    first = lenspipe.run(make_recipe(asked))
    monkeypatch.setattr("lenspipe.pipeline.Sender", None)
    assert lenspipe.run(make_recipe(asked)) == first
    assert recorded() == ["Completed"]
    monkeypatch.setenv("PREFECT_API_URL", PREFECT_API_URL.value())
    assert lenspipe.run(make_recipe(asked)) == first
    assert recorded() == ["Completed", "Completed"]


def test_a_plan_handed_to_the_flow_is_not_sent_to_workers(values: Values) -> None:
    from lenspipe.orchestration import Handed  # noqa: PLC0415 -- after the server's settings

    assert len(pickle.dumps(Handed(make_plan(make_recipe(values))))) < 100


def test_streaming_and_keeping_residuals_give_equal_numbers(values: Values, tmp_path: Path) -> None:
    kept = run(values)
    streamed = run(changed(values, capture__residuals="stream", run__store=str(tmp_path / "other")))
    assert_same(kept, streamed)
    assert not (tmp_path / "other/capture").exists()
    assert (Path(values["run"]["store"]) / "capture").exists()


def test_numbers_do_not_depend_on_how_the_work_was_cut(values: Values, tmp_path: Path) -> None:
    one = run(values)
    settings = {"shard_size": 100_000, "batch_tokens": 1, "workers": 2, "memory": "8 MiB"}
    other = changed(values, run__store=str(tmp_path / "other"))
    other["run"] |= settings
    two = run(other)
    for name in one.variables:
        if one[name].dtype.kind == "f" and "layer" in one[name].dims and name != "layer":
            np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-4)
        elif one[name].dtype.kind != "O":
            np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize(
    "settings, redone",
    [
        ({"read__top_k": 7}, {"encode": 0, "capture": 0, "read": "all", "assemble": 1}),
        ({"read__measures": ["entropy"]}, {"encode": 0, "capture": 0, "read": "all", "assemble": 1}),
        ({"read__tracked": [5]}, {"encode": 0, "capture": 0, "read": "all", "assemble": 1}),
        ({"read__precision": "float32"}, {"encode": 0, "capture": 0, "read": "all", "assemble": 1}),
        ({"read__uncovered": "logit"}, {"encode": 0, "capture": 0, "read": 0, "assemble": 0}),
        ({"model__parts": {"head": "lm_head"}}, {"encode": 0, "capture": "all", "read": "all", "assemble": 1}),
        ({"corpus__columns": []}, {"encode": "all", "capture": 0, "read": 0, "assemble": 1}),
        ({"model__attention": "eager"}, {"encode": 0, "capture": "all", "read": "all", "assemble": 1}),
        ({"model__dtype": "bfloat16"}, {"encode": 0, "capture": "all", "read": "all", "assemble": 1}),
        ({"corpus__bos": "never"}, {"encode": "all", "capture": "all", "read": "all", "assemble": 1}),
        ({"corpus__max_length": 9}, {"encode": "all", "capture": "all", "read": "all", "assemble": 1}),
        ({"capture__positions": "last"}, {"encode": 0, "capture": "all", "read": "all", "assemble": 1}),
        ({"capture__residuals": "stream"}, {"encode": 0, "capture": 0, "read": 0, "assemble": 0}),
        ({"run__shard_size": 9999}, {"encode": 0, "capture": 0, "read": 0, "assemble": 0}),
        ({"run__batch_tokens": 1}, {"encode": 0, "capture": 0, "read": 0, "assemble": 0}),
        ({"run__memory": "2 MiB"}, {"encode": 0, "capture": 0, "read": 0, "assemble": 0}),
        ({"run__workers": 3}, {"encode": 0, "capture": 0, "read": 0, "assemble": 0}),
    ],
    ids=lambda value: next(iter(value)) if "encode" not in value else "",
)
def test_one_changed_setting_redoes_exactly_what_it_must(
    values: Values, settings: dict[str, Any], redone: dict[str, Any]
) -> None:
    lenspipe.run(make_recipe(values))
    asked = changed(values, **settings)
    totals = {stage: total for stage, total, _ in make_plan(make_recipe(asked)).counts()}
    expected = {stage: totals[stage] if n == "all" else n for stage, n in redone.items()}
    assert todo(asked) == expected
    assert totals["encode"] > 2


def test_adding_a_layer_captures_only_that_layers_cells(values: Values) -> None:
    few = changed(values, capture__layers=[1, -1])
    lenspipe.run(make_recipe(few))
    more = changed(values, capture__layers=[1, 2, -1])
    shards = len(make_plan(make_recipe(more)).shards)
    assert todo(more) == {"encode": 0, "capture": shards, "read": shards, "assemble": 1}
    ds = run(more)
    assert ds["layer"].values.tolist() == [1, 2, 4]
    assert_same(ds, run(values).sel(layer=[1, 2, 4]))


def test_one_more_document_costs_one_shard(values: Values, write_corpus: Callable[..., str]) -> None:
    texts = [f"Document number {i} says something of its own, and then it ends." for i in range(30)]
    grown = changed(values, corpus__limit=None, corpus__columns=[], read__answer=None)
    grown["corpus"]["source"] = write_corpus(texts)
    lenspipe.run(make_recipe(grown))
    write_corpus([*texts, "One more."])
    sites = 5
    assert todo(grown) == {"encode": 1, "capture": sites, "read": sites, "assemble": 1}
    assert run(grown).sizes["document"] == 31


def test_a_killed_task_leaves_what_was_finished(values: Values) -> None:
    """Losing some artifacts redoes those alone, and the dataset is the same to the bit."""
    whole = run(values).load()
    store = ArtifactStore(Path(values["run"]["store"]))
    plan = make_plan(make_recipe(values))
    lost = plan.shards[1]
    store.set_aside("assemble", plan.dataset)
    store.set_aside("read", lost.cells[2].read)
    store.set_aside("capture", lost.cells[2].capture)
    assert todo(values) == {"encode": 0, "capture": 1, "read": 1, "assemble": 1}
    assert_same(run(values), whole)


def test_a_damaged_artifact_is_redone_and_said(values: Values) -> None:
    whole = run(values).load()
    plan = make_plan(make_recipe(values))
    store = ArtifactStore(Path(values["run"]["store"]))
    store.set_aside("assemble", plan.dataset)
    cell = plan.shards[0].cells[1]
    table = store.path("read", cell.read) / "arrays.safetensors"
    table.write_bytes(table.read_bytes()[:-1])  # truncated: seen when planning
    flipped = store.path("read", plan.shards[1].cells[3].read) / "arrays.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1  # one bit: seen when read
    flipped.write_bytes(content)
    said: list[str] = []
    ds = lenspipe.open_dataset(lenspipe.run(make_recipe(values), say=said.append))
    assert_same(ds, whole)
    assert any("damaged" in line and cell.read[:12] in line for line in said)
    assert any("damaged" in line and plan.shards[1].cells[3].read[:12] in line for line in said)


def test_a_damaged_residual_never_becomes_a_number(values: Values) -> None:
    whole = run(values).load()
    plan = make_plan(make_recipe(values))
    store = ArtifactStore(Path(values["run"]["store"]))
    key = plan.shards[0].cells[2].capture
    chunk = next(
        path for path in (store.path("capture", key) / "residual.zarr/residual/c").rglob("*") if path.is_file()
    )
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 4
    chunk.write_bytes(content)
    said: list[str] = []
    asked = changed(values, read__top_k=3)
    ds = lenspipe.open_dataset(lenspipe.run(make_recipe(asked), say=said.append))
    assert any("capture" in line and "damaged" in line for line in said)
    np.testing.assert_array_equal(ds["topk_id"], whole["topk_id"].isel(k=slice(0, 3)))


def test_manifests_inputs_spell_the_key(values: Values) -> None:
    run(values)
    root = Path(values["run"]["store"])
    seen = set()
    for path in root.glob("*/*/*/manifest.json"):
        found = json.loads(path.read_text())
        assert (
            artifact_key(found["stage"], VERSION.get(found["stage"], 1), found["inputs"])
            == found["key"]
            == path.parent.name
        )
        seen.add(found["stage"])
    assert seen == set(ALL_STAGES)


def test_a_store_holds_artifacts_and_nothing_of_prefect(values: Values) -> None:
    run(values)
    root = Path(values["run"]["store"])
    assert sorted(path.name for path in root.iterdir()) == sorted([*ALL_STAGES, "drafts", "leases", "owners", "runs"])
    assert not [path for path in root.rglob("*") if "prefect" in path.name]
    assert list((root / "leases").iterdir()) == []
    assert [path for folder in (root / "drafts").iterdir() for path in folder.iterdir()] == []


def test_long_documents_are_split_and_every_token_counts_once(values: Values, tmp_path: Path) -> None:
    text = (ROOT / "data/corpora/prose.txt").read_text()[:3000]
    path = tmp_path / "long.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    asked = {**values, "corpus": {"source": str(path), "max_length": 40, "stride": 16}, "read": {"top_k": 1}}
    ds = run(asked)
    tokenizer = transformers.AutoTokenizer.from_pretrained(values["model"]["source"])
    assert ds["input_id"].values.tolist() == tokenizer(text)["input_ids"]
    assert ds["position"].values.tolist() == list(range(ds.sizes["token"]))
    assert ds["document_length"].values.tolist() == [ds.sizes["token"]]
    ends = np.flatnonzero(np.diff(ds["sequence"].values))
    assert (ds["target_id"].values[ends] == -1).all()
    assert ds["is_special"].values.tolist() == [True] + [False] * (ds.sizes["token"] - 1)


def test_context_of_a_window_is_the_text_before_it(values: Values, write_corpus: Callable[..., str]) -> None:
    """The last token of a stride-1 window sees exactly max_length tokens: BOS and those before it."""
    words = " ".join(f"word{i}" for i in range(12))
    asked = {**values, "corpus": {"source": write_corpus([words]), "max_length": 12, "stride": 1}, "read": {"top_k": 3}}
    ds = run(asked)
    folder = values["model"]["source"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(words)["input_ids"]
    at = 20
    with torch.no_grad():
        logits = model(torch.tensor([[ids[0], *ids[at - 10 : at + 1]]])).logits[0, -1]
    np.testing.assert_allclose(ds["topk_logit"].sel(layer=4).values[at], logits.topk(3).values, atol=1e-4)


def test_positions_select_rows_of_the_full_dataset(values: Values) -> None:
    full = run(values)
    last = run(changed(values, capture__positions=[0, -1]))
    length = full["document_length"].values
    ends = np.cumsum(length)
    rows = np.sort(np.concatenate([ends - length, ends - 1]))
    np.testing.assert_array_equal(last["topk_id"], full["topk_id"].isel(token=rows))
    assert last["document_length"].values.tolist() == [2] * 12


def test_chat_messages_go_through_the_template(values: Values, tmp_path: Path) -> None:
    folder = tmp_path / "chatty"
    folder.mkdir()
    for path in (ROOT / "data/tiny-model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    corpus = tmp_path / "chat.jsonl"
    corpus.write_text(json.dumps({"chat": [{"role": "user", "content": "Hello"}, {"role": "bot", "content": "Hi"}]}))
    asked = {
        **values,
        "model": {"source": str(folder)},
        "corpus": {"source": str(corpus), "messages": "chat"},
        "read": {},
    }
    ds = run(asked)
    assert "".join(ds.lens.tokens().values[1:]) == "[user] Hello\n[bot] Hi\n"
    assert ds["input_id"].values[0] == 0 != ds["input_id"].values[1]


def test_a_model_that_computes_otherwise_than_the_stores_adds_nothing_to_it(values: Values) -> None:
    recipe = make_recipe(values)
    other = load_model(recipe, read_facts(recipe))
    other.hf.model.layers[1].mlp.register_forward_hook(lambda _m, _a, output: output * 1.5)
    hold_model(ArtifactStore(recipe.store), recipe, other)  # as a version of a library might have computed
    with pytest.raises(RequestError, match="computes other numbers than when"):
        run(values)
    assert [name for name in ("capture", "read", "assemble") if ArtifactStore(recipe.store).keys(name)] == []


def broken_at_a_token(values: Values, folder: Path) -> tuple[Values, int]:
    """Save a model whose embedding of one token, first met in document 3, is NaN; returns its position there."""
    model = transformers.AutoModelForCausalLM.from_pretrained(values["model"]["source"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(values["model"]["source"])
    texts = [json.loads(line)["text"] for line in Path(values["corpus"]["source"]).read_text().splitlines()][:12]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    bad = next(i for i in ids[3] if i not in probe_ids(model) and not any(i in others for others in ids[:3]))
    with torch.no_grad():
        model.model.embed_tokens.weight[bad, 0] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return changed(values, model__source=str(folder)), ids[3].index(bad)


def test_a_state_that_is_not_finite_is_refused_by_place(values: Values, tmp_path: Path) -> None:
    broken, position = broken_at_a_token(values, tmp_path / "broken")
    with pytest.raises(NonFiniteError, match=rf"resid_pre\.0 is not finite at position {position} of document 3"):
        run(changed(broken, run__batch_tokens=1))


@pytest.mark.parametrize("residuals", ["keep", "stream"])
def test_states_that_are_not_finite_are_kept_and_counted_if_asked(
    values: Values, tmp_path: Path, residuals: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(values)
    broken, position = broken_at_a_token(values, tmp_path / "broken")
    keep = changed(broken, capture__nonfinite="keep", capture__residuals=residuals, read__measures=["entropy", "topk"])
    ds = run(keep)
    missing = ds["entropy"].isnull().values
    first = np.flatnonzero((ds["document"] == 3).values & (ds["position"] == position).values)[0]
    assert missing[0, first]
    assert not missing[:, (ds["document"] < 3).values].any()
    np.testing.assert_array_equal(ds["topk_id"].values[..., 0] == -1, missing)
    counts = {f"logit {site}": int(n) for site, n in zip(ds["site"].values, missing.sum(axis=1), strict=True) if n}
    assert json.loads(ds.attrs["nonfinite"]) == counts
    assert json.loads(whole.attrs["nonfinite"]) == {}
    valid = ~ds["is_special"].values & ~missing.any(axis=0)
    document = ds["document"].values
    means = [ds["entropy"].values[1, valid & (document == d)].mean() for d in np.unique(document[valid])]
    assert layer_table(ds)["entropy"].iloc[1] == pytest.approx(np.mean(means))
    show(Path(ds.encoding["source"]))
    assert f"{counts['logit resid_pre.0']} rows have logits that are not finite" in capsys.readouterr().out


def test_a_model_whose_weights_are_broken_is_refused(values: Values, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(values["model"]["source"])
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0] = float("inf")
    model.save_pretrained(tmp_path / "broken")
    transformers.AutoTokenizer.from_pretrained(values["model"]["source"]).save_pretrained(tmp_path / "broken")
    with pytest.raises(ModelError, match="the weights are broken"):
        run(changed(values, model__source=str(tmp_path / "broken")))


def test_a_tracked_string_of_several_tokens_is_refused_with_its_pieces(values: Values) -> None:
    with pytest.raises(RequestError, match=r"'Wonderland' is \d tokens: 'W' \("):
        run(changed(values, read__tracked=["Wonderland"]))
    assert not (Path(values["run"]["store"]) / "encode").exists()


def test_a_run_gives_up_on_damage_that_comes_back(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    from lenspipe import pipeline  # noqa: PLC0415 -- after the server's settings

    calls = []

    def always(_recipe: Any) -> Any:
        calls.append(1)
        raise DamagedArtifactError("again")

    monkeypatch.setattr(pipeline, "run_flow", always)
    with pytest.raises(DamagedArtifactError):
        lenspipe.run(make_recipe(values))
    assert len(calls) == 3


@pytest.mark.dask
def test_dask_workers_give_the_same_dataset(values: Values, tmp_path: Path) -> None:
    one = run(values)
    two = run(changed(values, run__runner="dask", run__workers=2, run__store=str(tmp_path / "dask")))
    assert_same(one, two)
