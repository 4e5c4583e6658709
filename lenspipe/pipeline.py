"""Pipeline: the Prefect tasks and the main flow: the whole story on one screen.

Plan; submit only what is missing; wait. Tasks are told keys and small values and pass none of their results on:
each stage finds the one before it in the artifact store, under its key.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from lenspipe.history import recorded
from lenspipe.models.facts import read_facts
from lenspipe.models.lens_model import LensModel
from lenspipe.models.shared import shared_model
from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.orchestration import Handed, Sender, is_transient, one_flow_run, task_runner, wait
from lenspipe.plan import Plan, Todo, publish_cut, require_room
from lenspipe.recipe import Recipe, make_recipe
from lenspipe.stages.assemble import assemble
from lenspipe.stages.capture import capture
from lenspipe.stages.encode import encode
from lenspipe.stages.read import load_lenses, read
from lenspipe.stages.sample import hold_model, hold_tokenizer
from lenspipe.stages.work import Cell, NamedTokens, ShardWork, dataset_key, sites_of
from lenspipe.storage.artifacts import ArtifactStore

listener: Callable[[str, int], None] | None = None
"""Told (stage, tokens) as work is done in this process; set by whoever shows progress."""


def _report(stage: str) -> Callable[[int], None]:
    return lambda tokens: listener(stage, tokens) if listener else None


@dataclass(frozen=True)
class _Work:
    """What a task is told, read back from its parameter."""

    store: ArtifactStore
    recipe: Recipe
    todo: list[Todo]
    stream: frozenset[int]
    named: NamedTokens

    @classmethod
    def of(cls, text: str) -> "_Work":
        values = json.loads(text)
        recipe = make_recipe(values["recipe"], values["base"])
        return cls(
            ArtifactStore(recipe.store),
            recipe,
            [Todo.from_dict(item) for item in values["tasks"]],
            frozenset(values["stream"]),
            NamedTokens.from_dict(values["named"]),
        )

    def model(self) -> LensModel:
        """Open the model, and make sure that it computes what it did for what the store holds already."""
        model = shared_model(self.recipe, read_facts(self.recipe))
        hold_model(self.store, self.recipe, model)
        return model

    def share(self, stage: str, make: Callable[[ShardWork, Sequence[Cell]], None]) -> None:
        """Make the cells of a stage that nobody else is making, shard by shard, until all are there."""

        def make_mine() -> None:
            for item in self.todo:
                with item.claimed(self.store, stage) as cells:
                    if cells:
                        make(item.shard, cells)

        self.store.until_whole([name for item in self.todo for name in item.artifacts(stage)], make_mine)


_OPTIONS: dict[str, Any] = {
    "task_run_name": "{title}",
    "retries": 2,
    "retry_delay_seconds": [1, 10],
    "retry_condition_fn": is_transient,
    "cache_policy": NO_CACHE,  # the artifact store decides what is done
    "persist_result": False,
}


@task(name="encode", **_OPTIONS)
def encode_task(title: str, work: str) -> str:
    """Tokenize some shards."""
    told = _Work.of(work)
    facts, shards = read_facts(told.recipe), [item.shard for item in told.todo]
    tokenizer = load_tokenizer(facts.folder, told.recipe.model.trust_remote_code)
    hold_tokenizer(told.store, facts, tokenizer)
    told.store.until_whole(
        [("encode", shard.encode) for shard in shards],
        lambda: encode(told.store, told.recipe, facts, tokenizer, shards, _report("encode")),
    )
    return title


@task(name="capture", **_OPTIONS)
def capture_task(title: str, work: str) -> str:
    """Capture some shards' residuals."""
    told = _Work.of(work)
    model = told.model()

    def make(shard: ShardWork, cells: Sequence[Cell]) -> None:
        capture(told.store, told.recipe, model, shard, cells, _report("capture"))

    told.share("capture", make)
    return title


@task(name="read", **_OPTIONS)
def read_task(title: str, work: str) -> str:
    """Read some shards out, from stored residuals or while capturing."""
    told = _Work.of(work)
    model = told.model()

    def make(shard: ShardWork, cells: Sequence[Cell]) -> None:
        stream = shard.index in told.stream
        read(told.store, told.recipe, model, shard, cells, told.named, stream, _report("read"))

    told.share("read", make)
    return title


@task(name="assemble", **_OPTIONS)
def assemble_task(title: str, work: str) -> str:
    """Put all readouts into one dataset."""
    told = _Work.of(work)
    facts, shards = read_facts(told.recipe), [item.shard for item in told.todo]
    tokenizer = load_tokenizer(facts.folder, told.recipe.model.trust_remote_code)
    sites = tuple(dict.fromkeys(sites_of(shards[0].cells, facts)))
    key = dataset_key(told.recipe, facts, shards)

    def make() -> None:
        with told.store.claim("assemble", [key]) as mine:
            if mine:
                assemble(told.store, told.recipe, facts, tokenizer, sites, shards, told.named, _report("assemble"))

    told.store.until_whole([("assemble", key)], make)
    return title


@flow(name="lenspipe", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def lens_flow(name: str, recipe: dict[str, Any], base: str, handed: Handed) -> str:
    """Do what a plan left to do; returns the dataset's path. Recipe and base are for the record."""
    plan = handed.plan
    create_table_artifact(
        [{"stage": stage, "artifacts": n, "reused": n - todo, "to do": todo} for stage, n, todo in plan.counts()],
        key="lenspipe-plan",
        description=f"dataset {plan.dataset}",
    )
    if plan.is_done:
        return str(plan.dataset_path)
    require_room(plan)
    ArtifactStore(plan.recipe.store).require_writable()
    tokenizer = load_tokenizer(plan.facts.folder, plan.recipe.model.trust_remote_code)
    named = NamedTokens.find(plan.recipe, lambda token: tokenizer.single(token, plan.facts.vocab_size))
    if plan.read:
        load_lenses(plan.recipe, plan.facts, plan.sites)
    publish_cut(plan)
    send = Sender(plan, named)
    wait(send.batches(encode_task, plan.encode, most=4 * plan.recipe.run.workers))
    captured = send.batches(capture_task, plan.capture)
    wait(captured, send.batches(read_task, plan.read, after=captured))
    if plan.assemble:
        wait({0: send.one(assemble_task, "dataset", list(map(Todo, plan.shards)))})
    return str(plan.dataset_path)


def run_flow(plan: Plan) -> Path:
    """Carry a plan out with the runner that its recipe names; returns the dataset's path."""
    recipe = plan.recipe
    chosen = lens_flow.with_options(task_runner=task_runner(recipe.run))
    with one_flow_run(recipe.run), nullcontext() if plan.is_done else recorded(plan):
        return Path(chosen(plan.title, recipe.as_dict(), recipe.base, Handed(plan)))
