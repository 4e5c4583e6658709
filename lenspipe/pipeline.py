"""Pipeline: the Prefect tasks and the main flow: the whole story on one screen.

Plan; submit only what is missing; wait. Tasks are told keys and small values and pass none of their results on:
each stage finds the one before it in the artifact store, under its key.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact

from lenspipe.models.facts import read_facts
from lenspipe.models.lens_model import shared_model
from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.orchestration import Sender, is_transient, no_heartbeat, task_runner, wait
from lenspipe.plan import Todo, make_plan, publish_cut, require_room
from lenspipe.recipe import Recipe, make_recipe
from lenspipe.stages.assemble import assemble
from lenspipe.stages.capture import capture
from lenspipe.stages.encode import encode
from lenspipe.stages.read import read
from lenspipe.storage.artifacts import ArtifactStore

listener: Callable[[str, int], None] | None = None
"""Told (stage, tokens) as work is done in this process; set by whoever shows progress."""


def _report(stage: str) -> Callable[[int], None]:
    return lambda tokens: listener(stage, tokens) if listener else None


def _setting(work: dict[str, Any]) -> tuple[ArtifactStore, Recipe]:
    return ArtifactStore(Path(work["store"])), make_recipe(work["recipe"], work["base"])


def _tasks(work: dict[str, Any]) -> list[Todo]:
    return [Todo.from_dict(values) for values in work["tasks"]]


_OPTIONS: dict[str, Any] = {
    "task_run_name": "{title}",
    "retries": 2,
    "retry_delay_seconds": [1, 10],
    "retry_condition_fn": is_transient,
    "persist_result": True,
    "result_serializer": "json",
}


@task(name="encode", **_OPTIONS)
def encode_task(title: str, work: dict[str, Any]) -> str:
    """Tokenize some shards."""
    store, recipe = _setting(work)
    facts = read_facts(recipe)
    tokenizer = load_tokenizer(facts.folder, recipe.model.trust_remote_code)
    encode(store, recipe, facts, tokenizer, [item.shard for item in _tasks(work)], _report("encode"))
    return title


@task(name="capture", **_OPTIONS)
def capture_task(title: str, work: dict[str, Any]) -> str:
    """Capture some shards' residuals."""
    store, recipe = _setting(work)
    model = shared_model(recipe, read_facts(recipe))
    for item in _tasks(work):
        capture(store, recipe, model, item.shard, item.cells, _report("capture"))
    return title


@task(name="read", **_OPTIONS)
def read_task(title: str, work: dict[str, Any]) -> str:
    """Read some shards out, from stored residuals or while capturing."""
    store, recipe = _setting(work)
    model = shared_model(recipe, read_facts(recipe))
    for item in _tasks(work):
        stream = item.shard.index in work["stream"]
        read(store, recipe, model, item.shard, item.cells, tuple(work["tracked"]), stream, _report("read"))
    return title


@task(name="assemble", **_OPTIONS)
def assemble_task(title: str, work: dict[str, Any]) -> str:
    """Put all readouts into one dataset."""
    store, recipe = _setting(work)
    plan = make_plan(recipe)
    tokenizer = load_tokenizer(plan.facts.folder, recipe.model.trust_remote_code)
    tracked = tuple(work["tracked"])
    assemble(store, recipe, plan.facts, tokenizer, plan.sites, plan.shards, tracked, _report("assemble"))
    return title


@flow(name="lenspipe", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def lens_flow(name: str, recipe: dict[str, Any], base: str) -> str:
    """Do what a recipe asks for and is not there yet; returns the dataset's path."""
    plan = make_plan(make_recipe(recipe, base))
    require_room(plan)
    create_table_artifact(
        [{"stage": stage, "artifacts": n, "reused": n - todo, "to do": todo} for stage, n, todo in plan.counts()],
        key="lenspipe-plan",
        description=f"dataset {plan.dataset}",
    )
    if plan.is_done:
        return str(plan.dataset_path)
    tokenizer = load_tokenizer(plan.facts.folder, plan.recipe.model.trust_remote_code)
    tracked = [tokenizer.single(token, plan.facts.vocab_size) for token in plan.recipe.read.tracked]
    publish_cut(plan)
    send = Sender(plan, tracked)
    wait(send.batches(encode_task, plan.encode, most=4 * plan.recipe.run.workers))
    captured = send.batches(capture_task, plan.capture)
    wait(captured | send.batches(read_task, plan.read, after=captured))
    if plan.assemble:
        wait({0: send.one(assemble_task, "dataset", (), [("assemble", plan.dataset)])})
    return str(plan.dataset_path)


def run_flow(recipe: Recipe) -> Path:
    """Run the flow with the runner that the recipe names."""
    name = f"{Path(recipe.model.source).name} on {Path((recipe.corpus.source or [str(recipe.corpus.hub)])[0]).name}"
    chosen = lens_flow.with_options(task_runner=task_runner(recipe.run))
    with no_heartbeat():
        return Path(chosen(name, recipe.as_dict(), recipe.base))
