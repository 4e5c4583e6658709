"""The table of docs/keys.md, held against the code: each field and fact is changed, and the keys are compared."""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from lenspipe.plan import Plan, make_plan, publish_cut
from lenspipe.recipe import Recipe, make_recipe
from lenspipe.stages import work
from tests.conftest import ROOT
from tests.keys_table import FACTS, FIELDS, STAGES, markdown

Values = dict[str, Any]


@pytest.fixture
def base(tmp_path: Path) -> Values:
    """A recipe on copies of its model and corpus, which a test may change; one document is longer than a sequence."""
    shutil.copytree(ROOT / "data/tiny-model", tmp_path / "model")
    lines = (ROOT / "data/corpora/recall.jsonl").read_text().splitlines()[:12]
    records = [json.loads(line) for line in lines]
    records[2]["text"] = " ".join(record["text"] for record in records) * 2
    write(tmp_path / "corpus.jsonl", [{**record, "TEXT": record["text"]} for record in records])
    (tmp_path / "SETS").write_text("a = [1, 2]")
    return {
        "model": {"source": str(tmp_path / "model")},
        "corpus": {"source": [str(tmp_path / "corpus.jsonl")], "max_length": 60},
        "capture": {"layers": [0, 1, 2]},
        "run": {"store": str(tmp_path / "store"), "shard_size": 300},
    }


def write(path: Path, records: list[Values]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path: Path) -> list[Values]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tuned_lens(folder: Path, factor: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    state = {f"{i}.{name}": factor * torch.ones(shape) for i in range(4) for name, shape in _SHAPES.items()}
    torch.save(OrderedDict(state), folder / "params.pt")
    config = {"d_model": 32, "num_hidden_layers": 4, "bias": True, "lens_type": "linear_tuned_lens"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_SHAPES = {"weight": (32, 32), "bias": (32,)}


def planned(values: Values) -> Plan:
    return make_plan(make_recipe(values))


def keys(plan: Plan) -> dict[str, Any]:
    """Per stage, its keys; of capture and read, by site as far as both plans have it."""
    cells = [(shard.index, cell) for shard in plan.shards for cell in shard.cells]
    return {
        "encode": [shard.encode for shard in plan.shards],
        "capture": {(i, cell.site): cell.capture for i, cell in cells},
        "read": {(i, cell.site): cell.read for i, cell in cells},
        "assemble": plan.dataset,
    }


def changed_stages(before: Plan, after: Plan) -> set[str]:
    found, old, new = set(), keys(before), keys(after)
    for stage in STAGES:
        a, b = old[stage], new[stage]
        if isinstance(a, dict):
            shared = a.keys() & b.keys()
            assert shared
            a, b = ({name: part[name] for name in shared} for part in (a, b))
        if a != b:
            found.add(stage)
    return found


def fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += fields(inner, f"{prefix}{name}.")
        elif name != "base":
            found.append(f"{prefix}{name}")
    return found


def test_every_field_of_a_recipe_is_in_the_table() -> None:
    assert sorted(FIELDS) == sorted(fields(Recipe))


def test_the_docs_have_this_table() -> None:
    assert markdown() in (ROOT / "docs/keys.md").read_text()


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.to is not None])
def test_a_field_enters_the_keys_that_the_table_says(name: str, base: Values, tmp_path: Path) -> None:
    before = planned(base)
    publish_cut(before)
    values = json.loads(json.dumps(base))
    *groups, last = name.split(".")
    target = values
    for group in groups:
        target = target.setdefault(group, {})
    target[last] = FIELDS[name].to
    if name == "model.source":
        target[last] = shutil.copytree(tmp_path / "model", tmp_path / "moved").as_posix()
    elif name == "corpus.source":
        target[last] = [str(shutil.copy(tmp_path / "corpus.jsonl", tmp_path / "moved.jsonl"))]
    elif name == "read.lens":
        target[last] = [str(tuned_lens(tmp_path / "LENS"))]
        target["uncovered"] = "logit"
    elif name in ("read.token_sets", "run.store"):
        target[last] = str(tmp_path / FIELDS[name].to)
    assert changed_stages(before, planned(values)) == set(FIELDS[name].enters.split())


def rewrite(name: str, change: Callable[[list[Values]], list[Values]]) -> Callable[[Path], None]:
    return lambda folder: write(folder / name, change(read(folder / name)))


def alter(column: str, value: str) -> Callable[[list[Values]], list[Values]]:
    return lambda records: [{**records[0], column: value}, *records[1:]]


def edit_json(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def flip_weights(folder: Path) -> None:
    path = next((folder / "model").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def move_everything(folder: Path) -> None:
    for path in (folder / "model").iterdir():
        path.touch()
    (folder / "corpus.jsonl").touch()


CHANGES: dict[str, Callable[[Path], None]] = {
    "the bytes of the weights": flip_weights,
    "the model's config": edit_json("config.json", rms_norm_eps=0.25),
    "the tokenizer's files": edit_json("tokenizer_config.json", clean_up_tokenization_spaces=True),
    "a document's text": rewrite("corpus.jsonl", alter("text", "another text")),
    "the order of the documents": rewrite("corpus.jsonl", lambda records: records[::-1]),
    "a kept value": rewrite("corpus.jsonl", alter("category", "another")),
    "an answer": rewrite("corpus.jsonl", alter("answer", "another")),
    "the bytes of a lens's numbers": lambda folder: tuned_lens(folder / "LENS", factor=2.0) and None,
    "the contents of the token sets": lambda folder: (folder / "SETS").write_text("a = [1, 3]") and None,
    "names, places and times of files": move_everything,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_fact_enters_the_keys_that_the_table_says(name: str, base: Values, tmp_path: Path) -> None:
    read_with: Values = {"uncovered": "logit", "lens": ["logit"]}
    if name == "the bytes of a lens's numbers":
        read_with["lens"] = [str(tuned_lens(tmp_path / "LENS"))]
    if name == "the contents of the token sets":
        read_with["token_sets"] = str(tmp_path / "SETS")
    if name == "an answer":
        read_with["answer"] = "answer"
    columns = ["category"] if name == "a kept value" else []
    values = {**base, "read": read_with, "corpus": {**base["corpus"], "columns": columns}}
    before = planned(values)
    CHANGES[name](tmp_path)
    assert changed_stages(before, planned(values)) == set(FACTS[name].enters.split())


@pytest.mark.parametrize("stage", STAGES)
def test_a_stages_version_enters_its_keys_and_those_that_rest_on_it(
    stage: str, base: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = planned(base)
    monkeypatch.setitem(work.VERSION, stage, work.VERSION[stage] + 1)
    assert changed_stages(before, planned(base)) == set(STAGES[STAGES.index(stage) :])


def test_a_field_that_no_test_changes_belongs_to_a_hub_or_to_chats() -> None:
    left = {name for name, field in FIELDS.items() if field.to is None}
    assert left == {"model.revision", "corpus.hub", "corpus.hub_config", "corpus.messages"}


def test_a_fact_that_no_test_changes_enters_nothing_or_is_tested_elsewhere() -> None:
    left = {name for name in FACTS if name not in CHANGES}
    assert left == {
        "the version of a stage's numbers",
        "versions of torch, transformers, numpy ...",
        "the processor and the number of threads",
    }
