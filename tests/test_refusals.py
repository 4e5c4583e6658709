"""Refusals: what a plan expects of the disk, and what it refuses before anything is computed."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lenspipe
from lenspipe.errors import NonFiniteError, RequestError, StoreError
from lenspipe.models.lens_model import LensModel
from lenspipe.plan import make_plan, require_room
from lenspipe.recipe import make_recipe
from lenspipe.stages.read import BROKEN, refuse_broken
from tests.conftest import ROOT

Values = dict[str, Any]


def disk(**numbers: int) -> Callable[[Path], SimpleNamespace]:
    """A file system with little left of something."""
    plenty = {"f_bavail": 2**40, "f_frsize": 1, "f_files": 2**30, "f_favail": 2**30}
    return lambda _: SimpleNamespace(**(plenty | numbers))


def test_more_bytes_than_allowed_are_refused(values: Values) -> None:
    plan = make_plan(make_recipe(values))
    needed = plan.bytes_to_write()
    enough = {**values, "run": {**values["run"], "max_bytes": needed}}
    require_room(make_plan(make_recipe(enough)))
    short = {**values, "run": {**values["run"], "max_bytes": needed - 1}}
    with pytest.raises(RequestError, match=rf"may write {needed:,} bytes, and run.max_bytes is {needed - 1:,}"):
        require_room(make_plan(make_recipe(short)))


def test_bytes_may_be_spelled_with_units(values: Values) -> None:
    asked = make_recipe({**values, "run": {**values["run"], "max_bytes": "1.5 GiB"}})
    assert asked.run.max_bytes == 3 * 2**29


def test_a_disk_without_room_is_refused(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(make_recipe(values))
    monkeypatch.setattr(os, "statvfs", disk(f_bavail=plan.bytes_to_write() - 1))
    with pytest.raises(StoreError, match=r"needs about .* GiB under .*, and .* GiB are free"):
        require_room(plan)
    assert not Path(values["run"]["store"]).exists()


def test_a_file_system_without_room_for_files_is_refused(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(make_recipe(values))
    monkeypatch.setattr(os, "statvfs", disk(f_favail=plan.files_to_write() - 1))
    with pytest.raises(StoreError, match=r"needs about .* files under .*, and the file system has room for"):
        require_room(plan)
    monkeypatch.setattr(os, "statvfs", disk(f_files=0, f_favail=0))
    require_room(plan)


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("residuals", ["keep", "stream"])
@pytest.mark.parametrize("measures", [["topk", "entropy"], ["marginal"]])
def test_estimates_are_near_and_not_below_what_is_written(
    values: Values, residuals: str, measures: list[str], write_corpus: Callable[..., str]
) -> None:
    draw = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs"]
    texts = [" ".join(draw.choice(words, 900)) for _ in range(8)]
    asked = {
        **values,
        "corpus": {"source": write_corpus(texts)},
        "capture": {"residuals": residuals},
        "read": {"measures": measures},
        "run": {**values["run"], "shard_size": 8000, "batch_tokens": 1024},
    }
    plan = make_plan(make_recipe(asked))
    lenspipe.run(make_recipe(asked))
    stages = [Path(asked["run"]["store"], stage) for stage in ("encode", "capture", "read", "assemble")]
    files = [path for stage in stages for path in stage.rglob("*") if path.is_file()]
    assert 0.8 * len(files) <= plan.files_to_write() <= 2 * len(files)
    tokens = make_plan(make_recipe(asked)).n_tokens()  # exact by now
    written = sum(path.stat().st_size for path in files)
    assert written <= 1.2 * plan.bytes_to_write() * tokens / plan.n_tokens()


def test_logits_that_are_not_finite_are_refused_though_the_states_are() -> None:
    model = LensModel.load(ROOT / "data/tiny-model", device="cpu")
    readouts = {("logit", "resid_post.1"): {BROKEN: np.array([3])}, ("logit", "resid_post.0"): {BROKEN: np.array([0])}}
    with pytest.raises(
        NonFiniteError, match=r"3 rows of documents 4 to 8 have logits that are not finite at resid_post\.1"
    ):
        refuse_broken(readouts, (4, 9), model.facts)


def test_a_prompt_whose_logits_overflow_is_refused() -> None:
    model = LensModel.load(ROOT / "data/tiny-model", device="cpu")
    with torch.no_grad():
        model.unembed.head.weight_VD[5] = 3e38
    with pytest.raises(NonFiniteError, match="have logits that are not finite"):
        lenspipe.logit_lens(model, "the cat")
