"""Growth: a corpus that changes a little costs a little, and what is the same is done once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lenspipe
from lenspipe.plan import Plan, make_plan, publish_cut
from lenspipe.recipe import Recipe, make_recipe
from lenspipe.storage.artifacts import ArtifactStore

Values = dict[str, Any]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs", "run"]


def texts(n: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(3, 40))) + f" {seed} {i}" for i in range(n)]


def recipe(values: Values, folder: Path, corpus: Sequence[str], name: str = "corpus.jsonl") -> Recipe:
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus))
    run = {**values["run"], "shard_size": 20_000}
    return make_recipe({**values, "corpus": {"source": str(folder / name)}, "read": {}, "run": run})


def planned(values: Values, folder: Path, corpus: Sequence[str]) -> Plan:
    return make_plan(recipe(values, folder, corpus))


def redone(before: Plan, after: Plan) -> tuple[int, int]:
    """Shards of the later plan that the earlier has not, and all its shards."""
    known = {shard.encode for shard in before.shards}
    return sum(shard.encode not in known for shard in after.shards), len(after.shards)


CORPUS = texts(10_000)


@pytest.fixture
def before(values: Values, tmp_path: Path) -> Plan:
    plan = planned(values, tmp_path, CORPUS)
    publish_cut(plan)
    return plan


@pytest.mark.parametrize("at", [0, 1, 4_321, 9_999, 10_000])
def test_one_document_inserted_in_10_000_redoes_two_shards_at_most(
    at: int, before: Plan, values: Values, tmp_path: Path
) -> None:
    n, total = redone(before, planned(values, tmp_path, [*CORPUS[:at], "a new document", *CORPUS[at:]]))
    assert total > 40
    assert 1 <= n <= 2


@pytest.mark.parametrize("at", [0, 5_000, 9_999])
@pytest.mark.parametrize("edited", [[], ["another text altogether"]])
def test_one_document_deleted_or_edited_redoes_two_shards_at_most(
    at: int, edited: list[str], before: Plan, values: Values, tmp_path: Path
) -> None:
    n, _ = redone(before, planned(values, tmp_path, [*CORPUS[:at], *edited, *CORPUS[at + 1 :]]))
    assert 1 <= n <= 2


def test_a_tenth_more_at_the_end_costs_a_tenth(before: Plan, values: Values, tmp_path: Path) -> None:
    n, total = redone(before, planned(values, tmp_path, [*CORPUS, *texts(1_000, seed=1)]))
    assert n <= 0.1 * total + 2


def test_the_order_of_large_parts_does_not_matter_to_most_shards(before: Plan, values: Values, tmp_path: Path) -> None:
    n, _ = redone(before, planned(values, tmp_path, [*CORPUS[5_000:], *CORPUS[:5_000]]))
    assert n <= 4


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_shards_that_two_corpora_share_are_captured_once_and_assembled_without_computing(
    values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**values, "run": {**values["run"], "shard_size": 300}}
    one, other = texts(30), texts(30, seed=2)

    def asked(corpus: list[str], name: str) -> Recipe:
        found = recipe(small, tmp_path, corpus, name)
        return found.model_copy(update={"run": found.run.model_copy(update={"shard_size": 300})})

    lenspipe.run(asked(one, "one.jsonl"))
    lenspipe.run(asked(other, "other.jsonl"))
    both = asked([*one, *other], "both.jsonl")
    todo = {stage: n for stage, _, n in make_plan(both).counts()}
    sites, seams = 5, 2
    assert todo["encode"] <= seams
    assert todo["capture"] == todo["read"] == sites * todo["encode"]
    lenspipe.run(both)

    def explode(*_: Any, **__: Any) -> None:
        raise AssertionError("something was computed")

    for stage in ("encode", "capture", "read"):
        monkeypatch.setattr(f"lenspipe.pipeline.{stage}", explode)
    monkeypatch.setattr("lenspipe.pipeline.shared_model", explode)
    plan = make_plan(both)
    first = lenspipe.open_dataset(plan.dataset_path).load()
    ArtifactStore(plan.recipe.store).remove("assemble", plan.dataset)
    again = lenspipe.open_dataset(lenspipe.run(both))
    for name in first.variables:
        np.testing.assert_array_equal(again[name], first[name])
